"""A Ray Serve application: the whole server as one deployment, and its engines as actors beside it.

Needs the extra `soothsay[ray]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from starlette.types import ASGIApp

from soothsay.errors import SoothsayError
from soothsay.server.access.api_keys import KeyRing
from soothsay.server.cluster.ray_engine import Cluster
from soothsay.server.engines.engine_process import PORTABLE, load
from soothsay.server.fleet.engine_fleet import Bounds, Fleet
from soothsay.server.http_server import Server
from soothsay.server.placement import stages_on_ray
from soothsay.server.server_config import MAX_STALL, ServerConfig, served_name

CLUSTER = "auto"
"""Serve runs the deployment inside a cluster, which is the one for the engines too."""

LIMITS = {field.name for field in fields(ServerConfig)} - {"name"}


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """Build the application, for `serve.run`, or for `import_path` in a configuration file of Ray Serve.

    There is one deployment with one replica: it knows the API keys' limits, the prefixes of all engines and
    the answers under way. `replicas` is the number of engines, or its bounds such as "1:3".

    Args:
        args: `model`, and further options of `soothsay serve` by these names: `name`, `replicas`,
            `replica_cores`, `portable`, `api_keys`; the fields of `ServerConfig`; and the options of `LLM`.

    Raises `SoothsayError` if there is no `model`.

    Example:
        >>> serve.run(build_app({"model": "sibyl", "replicas": 2}), route_prefix="/")
    """
    if "model" not in args:
        raise SoothsayError("build_app needs a model: args: {model: NAME}")
    deployment = serve.deployment(
        serve.ingress(_builder(dict(args)))(),
        name="soothsay",
        num_replicas=1,
        max_ongoing_requests=ServerConfig("").max_connections,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=args.get("drain", ServerConfig("").drain),
    )
    return deployment.bind()


def _builder(args: dict[str, Any]) -> Any:
    """A function that makes the ASGI application. Serve calls it in the deployment's process."""

    def build() -> ASGIApp:
        return serving(args).app

    return build


def serving(args: Mapping[str, Any]) -> Server:
    """The server, with engines that have started. They end with the lifespan of its application."""
    options = dict(args)
    model, name, keys = options.pop("model"), options.pop("name", None), options.pop("api_keys", None)
    replicas, cores = options.pop("replicas", 1), options.pop("replica_cores", 1)
    portable = options.pop("portable", False)
    options["stages"] = stages_on_ray(options.pop("stages", 1), cores)
    limits = {field: options.pop(field) for field in LIMITS & set(options)}
    limits |= {field: tuple(value) for field, value in limits.items() if isinstance(value, list)}  # of YAML
    options |= {"kernels": "portable"} if portable else {}
    factory = partial(load, model, cores=cores, **{"max_stall": MAX_STALL, **options})
    cluster = Cluster(CLUSTER, factory, cores, PORTABLE if portable else {})
    cluster.__enter__()  # it ends with this process, as the engines do
    fleet = Fleet(cluster.engine, Bounds.parse(str(replicas)))
    fleet.__enter__()
    config = ServerConfig(**{"name": name or served_name(model), "drafters": fleet.model.drafters, **limits})
    return Server(fleet, config, None if keys is None else KeyRing(Path(keys)))
