"""Level 4: communication proxies. Each builds a Schedule and has no loop of its own; one runner executes any of them, or the simulator does."""

from meshwright.proxies.proxy_registry import PROXIES as PROXIES
from meshwright.proxies.proxy_registry import find_proxy as find_proxy
