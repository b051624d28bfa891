# SPDX-License-Identifier: Apache-2.0
"""Which grammar is compiled next: tenants take turns, so that one with many slow grammars delays only its own. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class CompileQueue(Generic[K]):
    """Keys in the order of their tenants' turns; each key stands in it once."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, deque[K]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def add(self, tenant: str, key: K) -> None:
        """Behind the tenant's others; a tenant that has none gets the last turn."""
        self._tenants.setdefault(tenant, deque()).append(key)

    def pop(self) -> K:
        """The next key; raises KeyError when there is none."""
        tenant, keys = self._tenants.popitem(last=False)
        key = keys.popleft()
        if keys:
            self._tenants[tenant] = keys
        return key
