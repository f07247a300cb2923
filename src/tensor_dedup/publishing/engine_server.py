"""The HTTP server of an engine that is asked to load a step: vLLM's `POST /update_weights`.

Which weights an engine has, `GET /v1/models` says, where this package answers in vLLM.
"""

import http.client
import json
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from tensor_dedup.publishing.errors import EngineError, EngineUnreachableError, EngineUrlError

_UPDATE: Final = "/update_weights"
_MODELS: Final = "/v1/models"
_CONNECT_S: Final = 10.0
# Until then, the engine fetches the step and loads it beside the one that it runs.
_ANSWER_S: Final = 3600.0
_SAYS_S: Final = 10.0
_MOST_BYTES: Final = 1 << 20
_MOST_SAID: Final = 300
_NO_SUCH_PATH: Final = (
    "there is no /update_weights; start the server with VLLM_SERVER_DEV_MODE=1 and "
    '--weight-transfer-config \'{"backend": "tensor_dedup"}\''
)
_GUARDED: Final = (
    "with --api-key, /v1/models is guarded, so that a start at an earlier step goes unnoticed"
)


class EngineServer:
    """The server of an engine at `url`, `http://HOST:PORT`. Safe from any thread.

    Raises:
        EngineUrlError: The URL cannot be that of a server, or contains a credential.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
            (host or "").encode("idna")  # as each connection does
        except ValueError:
            raise EngineUrlError.at("...", "it is no URL") from None
        if parts.username is not None or parts.query or parts.fragment:
            raise EngineUrlError.at("...", "a user, a password or a query may be a secret")
        if parts.scheme not in ("http", "https") or not host:
            raise EngineUrlError.at(repr(url), "it names no server")
        self.url = url.rstrip("/")
        self._host, self._port, self._path = host, port, parts.path.rstrip("/")
        self._is_secure = parts.scheme == "https"

    def __repr__(self) -> str:
        return f"EngineServer({self.url!r})"

    def load(self, step: int) -> None:
        """Let the engine load a step of the run that it follows; return when it runs the step.

        Raises:
            EngineUnreachableError: The server does not answer.
            EngineError: The engine has not loaded the step.
        """
        body = json.dumps({"update_info": {"step": step}})
        status, said = self._ask("POST", _UPDATE, body, _ANSWER_S, step=step)
        if status != http.client.OK:
            what = _NO_SUCH_PATH if status == http.client.NOT_FOUND else _message(said)
            said_so = f"it answered {status} for the step {step}: {what}"
            raise EngineError.at(self.url, said_so, engine=self.url, step=step)

    def checkpoint_digest(self) -> str | None:
        """Return the digest of the checkpoint that the engine runs, or None if it does not say.

        Raises:
            EngineUnreachableError: The server does not answer.
            EngineError: The server answers with an error.
        """
        status, said = self._ask("GET", _MODELS, None, _SAYS_S)
        if status != http.client.OK:
            what = _GUARDED if status == http.client.UNAUTHORIZED else _message(said)
            said_so = f"it answered {status} when asked which weights it has: {what}"
            raise EngineError.at(self.url, said_so, engine=self.url)
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            return str(json.loads(said)["data"][0]["tensor_dedup"]["checkpoint_digest"])
        return None

    def _ask(
        self, method: str, path: str, body: str | None, wait_s: float, **facts: object
    ) -> tuple[int, bytes]:
        """Return the status and the body of an answer, no part of which takes over `wait_s`."""
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        link = kind(self._host, self._port, timeout=_CONNECT_S)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            link.connect()
            link.sock.settimeout(wait_s)
            link.request(method, self._path + path, body, headers)
            answer = link.getresponse()
            return answer.status, answer.read(_MOST_BYTES)
        except (OSError, http.client.HTTPException) as error:
            what = f"no answer ({str(error) or type(error).__name__})"
            raise EngineUnreachableError.at(self.url, what, engine=self.url, **facts) from error
        finally:
            link.close()


def _message(said: bytes) -> str:
    """Return what an answer says of its error, as vLLM words it, or its beginning."""
    text = said.decode("utf-8", "replace")
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        text = str(json.loads(text)["error"]["message"])
    return " ".join(text.split())[:_MOST_SAID] or "nothing"
