"""The options of `serve`, without the imports of serving."""

from __future__ import annotations

import ipaddress
import os

from pydantic import Field

from raytrain_gpt.config.call_options import Options

KEY_VARIABLE = "RAYTRAIN_GPT_API_KEY"


class ServeOptions(Options):
    """Options of a server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8000, ge=1, le=65535)
    """Port to listen on."""
    max_batch: int = Field(32, ge=1)
    """Sequences that a replica generates at the same time, and the maximum per request."""
    max_queue: int = Field(256, ge=0)
    """Waiting sequences per replica."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Upper limit of max_tokens in a request (default: the context)."""
    num_replicas: int = Field(1, ge=1)
    """Copies of the model, one per GPU if there are GPUs."""
    follow: bool = False
    """Load each new best checkpoint of a run while it trains."""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"

    @property
    def needs_key(self) -> bool:
        """Whether callers must send the API key. Replicas that lack the variable cannot compute it."""
        return not self.is_loopback or bool(os.environ.get(KEY_VARIABLE))
