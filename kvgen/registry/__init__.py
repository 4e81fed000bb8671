"""Registered winners: entries in three stores, and the choice among them."""

from kvgen.registry.store import Found, Store, find, packaged_store, site_store, stores, user_store

__all__ = ["Found", "Store", "find", "packaged_store", "site_store", "stores", "user_store"]
