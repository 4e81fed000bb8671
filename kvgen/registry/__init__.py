"""Registered winners: entries of plain text in three stores, and the choice among them."""

from __future__ import annotations

import os
from pathlib import Path

from kvgen._resources import generated
from kvgen.registry.store import Found, Store

__all__ = ["Found", "Store", "find", "packaged_store", "site_store", "stores", "user_store"]


def stores() -> list[Store]:
    """The stores in order of precedence: the user's, the site's, the one that ships. Entries tuned on this machine come first."""
    return [user_store(), site_store(), packaged_store()]


def user_store() -> Store:
    """`KVGEN_REGISTRY_DIR`, or kvgen's folder in the user's data folder; `kvgen build` writes to it."""
    override = os.environ.get("KVGEN_REGISTRY_DIR")
    if override:
        return Store(Path(override).absolute(), "user")
    from platformdirs import user_data_path

    return Store(user_data_path("kvgen") / "registry", "user")


def site_store() -> Store:
    """`KVGEN_SITE_DIR`, or kvgen's folder in the site's data folder; shared by a team."""
    override = os.environ.get("KVGEN_SITE_DIR")
    if override:
        return Store(Path(override).absolute(), "site")
    from platformdirs import site_data_path

    return Store(site_data_path("kvgen") / "registry", "site")


def packaged_store() -> Store:
    """The winners that ship with kvgen."""
    return Store(generated(), "packaged")


def find(key: str) -> list[Found]:
    """Entries of all stores whose key begins with `key`."""
    return [found for store in stores() for found in store.all() if found.path.name.startswith(key)]
