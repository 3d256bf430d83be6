"""The options of `serve`, without what serving imports."""

from __future__ import annotations

import ipaddress
import os

from pydantic import Field

from raytrain_gpt.config.call_options import Options

KEY_VARIABLE = "RAYTRAIN_GPT_API_KEY"


class ServeOptions(Options):
    """Where and how a checkpoint is served."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8000, ge=1, le=65535)
    """Port to listen on."""
    max_batch: int = Field(32, ge=1)
    """Sequences that a replica generates at the same time, and the most that one request may ask for."""
    max_queue: int = Field(256, ge=0)
    """Sequences that may wait at a replica."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Upper limit of max_tokens in a request (default: the context)."""
    num_replicas: int = Field(1, ge=1)
    """Copies of the model, one per GPU where there are any."""
    follow: bool = False
    """Load the new best checkpoints of a run while it trains."""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"

    @property
    def needs_key(self) -> bool:
        """Whether callers must send the API key. A replica that the variable did not reach cannot tell."""
        return not self.is_loopback or bool(os.environ.get(KEY_VARIABLE))
