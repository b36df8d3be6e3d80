"""What an optimizer's arguments are checked by, in the words of torch.optim."""

from __future__ import annotations

from ...errors import ConfigError


def require(what: str, value: object, holds: bool) -> None:
    """Raises ConfigError, a ValueError, in torch.optim's words unless it holds."""
    if not holds:
        raise ConfigError(what if value is None else f"Invalid {what}: {value}")
