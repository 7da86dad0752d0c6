"""Level 4: communication proxies. Each returns a Schedule and has no loop of its own; one runner executes or simulates any of them."""

from meshwright.proxies.proxy_registry import PROXIES, Proxy, find_proxy

__all__ = ["PROXIES", "Proxy", "find_proxy"]
