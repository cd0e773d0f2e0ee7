"""The routes of a server that has no engine, and the classes of their bodies by path."""

from __future__ import annotations

from typing import Any

from soothsay.server.engines.engine_messages import LoadedModel
from soothsay.server.fleet.server_metrics import Metrics
from soothsay.server.generation.service import Service
from soothsay.server.http_server import route_table
from soothsay.server.server_config import ServerConfig

NOTHING: Any = None
MODEL = LoadedModel(None, 260, 100, 1, 16, 50, "none", ())
ROUTES = route_table(Service(NOTHING, MODEL, ServerConfig("x")), NOTHING, NOTHING, Metrics("x"), None)
BODIES = {route.path: route.body for route in ROUTES if route.body is not None}
