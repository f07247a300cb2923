"""Check the environment variables that obstore reads, and remove secrets from texts. No I/O.

The check is needed because obstore panics on some invalid values, without naming the variable.
"""

import os
import re
from typing import Final
from urllib.parse import urlsplit

from tensor_dedup.remote.errors import RemoteAccessError, RemoteUnreachableError

# What may lead to a server of the user's own, by http too; Google's is in the key of an account.
# Of those of one meaning the last in the environment counts, and of those of S3 the first here.
_ENDPOINTS: Final = {
    "s3": (("AWS_ENDPOINT_URL_S3",), ("AWS_ENDPOINT_URL", "AWS_ENDPOINT")),
    "gs": (("GOOGLE_BASE_URL",),),
    "az": (("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),),
}
_GOOGLE_KEY: Final = "GOOGLE_SERVICE_ACCOUNT_KEY"  # which is JSON
# What obstore reads and a line break spoils. Other programs have variables that begin likewise, and
# some of these are keys of many lines.
_ONE_LINE: Final = {
    "s3": (
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_TOKEN"),
        *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SSE_KMS_KEY_ID", "AWS_SSE_CUSTOMER_KEY_BASE64"),
        *("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
    ),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_BEARER_TOKEN"),
    "az": (
        *("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY"),
        *("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_TOKEN"),
        *("AZURE_STORAGE_CLIENT_SECRET", "AZURE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE"),
        "AZURE_FABRIC_SESSION_TOKEN",
    ),
}
_QUERY: Final = re.compile(r"\?[^\s\"'>)]*")
# How obstore begins what it says of a request. The path is that of the object, which is named
# anyway; behind a long one the status and the server's reason would be cut off.
_ASKED: Final = re.compile(
    r"^.*?Error performing (\w+) (https?://[^/\s]+|REDACTED)\S* in \S+?(?:, after .*?)? - "
    r"(?:Server returned non-2xx )?"
)
# The document with which S3 and those who speak like it answer; it also holds what was signed.
_DOCUMENT: Final = re.compile(r"<(?:\?xml|Error\b).*")
_CODE: Final = re.compile(r"<Code>\s*([\w.-]{1,80})")
_MESSAGE: Final = re.compile(r"<Message>\s*([^<]*)")
# Up to the last @: a password may hold one.
_USER: Final = re.compile(r"//[^/\s]*@")
_SHOWN: Final = 240
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_SECRETS: Final = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|SAS", re.IGNORECASE)


def check_environment(url: str) -> None:
    """Check the environment variables that obstore would read for `url` and may panic on.

    Raises:
        RemoteUnreachableError: An endpoint variable is not a URL.
        RemoteAccessError: A variable, such as one with a credential, contains a line break.
    """
    scheme = urlsplit(url).scheme
    for names in _ENDPOINTS.get(scheme, ()):
        set_ = [name for name in os.environ if name in names]
        if not set_:
            continue
        name = set_[-1]
        if not _is_endpoint(os.environ[name]):
            state = "is no URL" if os.environ[name] else "is set and empty; unset it"
            raise RemoteUnreachableError.at(url, f"the variable {name} {state}")
        break
    for name in _ONE_LINE.get(scheme, ()):
        if _CONTROL.search(os.environ.get(name, "")):
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
    """Return whether the URL begins with http://, or an endpoint in the environment does."""
    names = [name for groups in _ENDPOINTS.values() for group in groups for name in group]
    endpoints = (os.environ.get(name, "") for name in (*names, _GOOGLE_KEY))
    return url.startswith("http://") or any("http://" in endpoint for endpoint in endpoints)


def told(text: str) -> str:
    """Return the essential part of an obstore error message, on one line.

    If the server answered with an XML document, its code and message replace the document. The
    result may still contain credentials; `scrubbed` removes them.
    """
    text = " ".join(text.partition("Debug source")[0].split())
    document = _DOCUMENT.search(text)
    if document is not None and (code := _CODE.search(document[0])) is not None:
        message = _MESSAGE.search(document[0])
        more = f": {message[1].strip()}" if message is not None and message[1].strip() else ""
        text = f"{text[: document.start()]}{code[1]}{more}"
    return _ASKED.sub(r"\1 \2: ", text)


def scrubbed(text: str) -> str:
    """Return an obstore message on one short line, without what looks like a credential."""
    text = told(text)
    for name, value in os.environ.items():
        if len(value) >= 6 and _SECRETS.search(name):
            text = text.replace(value, "***")
    text = re.sub(r"<AWSAccessKeyId>[^<]*", "<AWSAccessKeyId>***", text)
    return _USER.sub("//", _QUERY.sub("", text))[:_SHOWN]
