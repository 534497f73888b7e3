"""What a calibrator must have been fitted for: the routers in its folder, and the adapter and the base that they are for."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

CALIBRATOR = "calibrator.json"


def calibrated_for(description: Mapping[str, Any], routers: bytes) -> dict[str, Any]:
    """The fingerprints in `router.json`, and that of `router.safetensors`."""
    own = {name: description[name] for name in ("base", "adapter")}
    return own | {"routers": hashlib.sha256(routers).hexdigest()}


def signed(content: Mapping[str, Any], description: Mapping[str, Any], routers: bytes) -> bytes:
    """The bytes of `calibrator.json`: the calibrator, and the fingerprint of what it is for."""
    return (json.dumps({**content, "fingerprint": calibrated_for(description, routers)}, indent=1) + "\n").encode()
