"""The variables of the environment that obstore reads, checked before it does. No I/O.

It panics about some that are wrong, and then says neither which nor why.
"""

import os
import re
from typing import Final
from urllib.parse import urlsplit

from tensor_dedup.store.remote.errors import RemoteAccessError, RemoteUnreachableError

# What may lead to a server of the user's own, by http too; Google's is in the key of an account.
_ENDPOINTS: Final = (
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"),
    *("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "GOOGLE_BASE_URL"),
)
_GOOGLE_KEY: Final = "GOOGLE_SERVICE_ACCOUNT_KEY"
# What the variables of a service begin with, as obstore reads them.
_VARIABLES: Final = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
SECRETS: Final = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|SAS", re.IGNORECASE)


def check_environment(url: str) -> None:
    """Check the variables that obstore would panic about."""
    prefix = _VARIABLES.get(urlsplit(url).scheme)
    for name in sorted(os.environ) if prefix is not None else ():
        value = os.environ[name]
        if not name.startswith(prefix or "") or name == _GOOGLE_KEY:  # which is JSON
            continue
        if name in _ENDPOINTS and not _is_endpoint(value):
            state = "is no URL" if value else "is set and empty; unset it"
            raise RemoteUnreachableError.at(url, f"the variable {name} {state}")
        if (SECRETS.search(name) or name.endswith("REGION")) and _CONTROL.search(value):
            what = f"the variable {name} has a line break in it, as of a file that ends in one"
            raise RemoteAccessError.at(url, what)


def _is_endpoint(value: str) -> bool:
    try:
        parts = urlsplit(value)
    except ValueError:
        return False
    whole = parts.scheme in ("http", "https") and bool(parts.netloc)
    return whole and not any(each.isspace() or _CONTROL.match(each) for each in value)


def allows_http(url: str) -> bool:
    """Return whether the URL, or a variable that leads to a server, has http in place of https."""
    endpoints = (os.environ.get(name, "") for name in (*_ENDPOINTS, _GOOGLE_KEY))
    return url.startswith("http://") or any("http://" in endpoint for endpoint in endpoints)
