"""x"""
FAULTS = ()
