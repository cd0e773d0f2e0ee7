"""The container, the service and the dashboard run commands, and ask for metrics, that exist."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engines
import httpx
import pytest
import yaml
from places import ROOT
from serving import Running, serving
from test_docs import parse

from soothsay.server.server_config import ServerConfig

DEPLOY = ROOT / "deploy"
UNIT = ConfigParser(interpolation=None)
UNIT.read(DEPLOY / "soothsay.service")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana" / "soothsay.json").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_the_service_runs_a_command() -> None:
    program, *arguments = shlex.split(UNIT["Service"]["ExecStart"])
    assert program.endswith("/bin/soothsay")
    parse(arguments)


def test_the_service_ends_at_wrong_options_and_keeps_its_files_to_itself() -> None:
    assert UNIT["Service"]["RestartPreventExitStatus"] == "2"
    assert UNIT["Service"]["UMask"] == "0077"


def test_supervisors_wait_for_running_answers() -> None:
    """Docker and Compose kill after 10 s, unless they are told otherwise."""
    waits = [UNIT["Service"]["TimeoutStopSec"], COMPOSE["services"]["soothsay"]["stop_grace_period"]]
    page = (ROOT / "docs" / "deploy.md").read_text().replace("\\\n", "")
    runs = re.findall(r"^docker run .*", page, re.MULTILINE)
    waits += [*re.findall(r"--stop-timeout (\d+)", "\n".join(runs))]
    assert len(waits) == 2 + len(runs) >= 3
    assert all(float(wait.removesuffix("s")) > ServerConfig.drain for wait in waits)


def test_the_container_runs_a_command_as_a_user_without_a_compiler() -> None:
    entry, command = (
        json.loads(*re.findall(rf"^{word} (\[.*\])$", DOCKERFILE, re.MULTILINE))
        for word in ("ENTRYPOINT", "CMD")
    )
    assert entry == ["soothsay"]
    parse(command)
    final = DOCKERFILE.rpartition("\nFROM ")[2]
    assert "useradd --uid 1000 --create-home soothsay" in final
    assert "\nUSER 1000\n" in final
    assert "\nHEALTHCHECK " in final
    assert "g++" not in final


def test_the_services_of_compose_find_their_files_and_each_other() -> None:
    services = COMPOSE["services"]
    parse(services["soothsay"]["command"])
    assert (DEPLOY / services["soothsay"]["build"]["context"] / "Dockerfile").is_file()
    places = [volume.split(":") for service in services.values() for volume in service["volumes"]]
    for source, *_ in places:
        assert source in COMPOSE["volumes"] or (DEPLOY / source).is_file(), source
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text())["providers"]
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasources.yaml").read_text())["datasources"]
    (target,) = job["static_configs"][0]["targets"]
    for address in (target, source["url"].removeprefix("http://")):
        name, _, port = address.partition(":")
        assert services[name]["ports"][0].endswith(f":{port}")
    dashboards = [inside for _, inside, *_ in places if inside.endswith(".json")]
    assert [str(Path(inside).parent) for inside in dashboards] == [provider["options"]["path"]]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A server whose answers are drafted as by default. A few have been answered."""
    for program in ("prometheus", "promtool"):
        if shutil.which(program) is None:
            pytest.skip(f"no Prometheus: {program} is not installed")
    with serving(engines.steered) as one:
        ask(one)
        yield one


def ask(running: Running) -> None:
    """An answer with draft tokens, and a request that fails."""
    body = {"model": "sibyl", "prompt": "to be or not to be, to be or", "max_tokens": 30, "temperature": 0}
    assert httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).is_success
    assert httpx.get(f"{running.url}/nothing", timeout=60).status_code == 404


def promtool(*arguments: str, given: str = "") -> str:
    """What `promtool check` says. Fails if it finds an error."""
    command = ["promtool", "check", *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_accepts_the_metrics(running: Running) -> None:
    """It advises against colons in names, which vLLM's have, and so those that are like them."""
    text = httpx.get(f"{running.url}/metrics", timeout=60).text
    assert promtool("metrics", given=re.sub("(soothsay|vllm):", r"\1_", text)) == ""


@contextmanager
def prometheus(running: Running, folder: Path) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """A Prometheus with the configuration of compose that reads a server often. Yields what asks it."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "200ms"
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [running.url.removeprefix("http://")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = {
        "config.file": "prometheus.yml",
        "storage.tsdb.path": "data",
        "web.listen-address": address,
        "log.level": "error",
    }
    command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    def query(expression: str) -> list[dict[str, Any]]:
        assert process.poll() is None, (folder / "log").read_text()
        reply = httpx.get(f"http://{address}/api/v1/query", params={"query": expression}, timeout=60)
        assert reply.status_code != 400, f"{expression}: {reply.text}"
        result = reply.raise_for_status().json()["data"]["result"]
        return [one for one in result if math.isfinite(float(one["value"][1]))]

    def answers() -> bool:
        try:
            return bool(query("up"))
        except httpx.HTTPError:
            return False

    try:
        running.wait_until(answers, 60)
        yield query
    finally:
        process.terminate()
        process.wait()


def test_prometheus_reads_what_the_dashboard_shows(running: Running, tmp_path: Path) -> None:
    """Each query has numbers within the bounds of its unit, and the labels of its legend.

    Rates are extrapolated, so a share is beyond 1 where one of its two series is older than the other.
    """
    promtool("config", str(DEPLOY / "prometheus.yml"))
    (variable,) = DASHBOARD["templating"]["list"]
    values = {"$__rate_interval": "60s", f"${variable['name']}": variable["allValue"]}
    with prometheus(running, tmp_path) as query:
        metric, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["query"]["query"]).groups()
        for panel in DASHBOARD["panels"]:
            most = 1 if panel["fieldConfig"]["defaults"]["unit"] == "percentunit" else math.inf
            for target in panel["targets"]:
                expression = target["expr"]
                for name, value in values.items():
                    expression = expression.replace(name, value)
                found: list[dict[str, Any]] = []
                for _ in range(50):
                    found = query(expression)
                    if found and all(0 <= float(one["value"][1]) <= most for one in found):
                        break
                    ask(running)
                else:
                    raise AssertionError(f"{panel['title']}: {expression} has {found}")
                for series in found:
                    assert list(series["metric"]) == re.findall(r"{{(\w+)}}", target["legendFormat"])
        assert [series["metric"][label] for series in query(metric)] == ["sibyl"]


def test_the_dashboard_has_an_own_place_for_each_panel() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len({*places}) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
