"""x"""
CASES = {}
