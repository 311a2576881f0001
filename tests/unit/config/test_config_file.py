"""Reading the configuration file: what is accepted, and the one line that each wrong setting gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trustme
from warmslot.router.config_file import ConfigError, dump, load, parse

if TYPE_CHECKING:
    from pathlib import Path

MINIMAL = """\
pools:
  - name: p
    backends:
      - name: b
        model: demo
"""


def lines_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml")
    return caught.value.lines


def with_backend(extra: str) -> str:
    return MINIMAL + "".join(f"        {line}\n" for line in extra.splitlines())


WRONG = {
    "integer as text": (
        with_backend("slots: four"),
        'f.yaml:6: pools[0].backends[0].slots: found "four", allowed: an integer from 1 to 256',
    ),
    "quoted integer": (
        with_backend('slots: "4"'),
        'f.yaml:6: pools[0].backends[0].slots: found "4", allowed: an integer from 1 to 256',
    ),
    "boolean for an integer": (
        with_backend("slots: true"),
        "f.yaml:6: pools[0].backends[0].slots: found true, allowed: an integer from 1 to 256",
    ),
    "out of range": (
        with_backend("slots: 0"),
        "f.yaml:6: pools[0].backends[0].slots: found 0, allowed: an integer from 1 to 256",
    ),
    "list for a text": (
        with_backend("slot_save_path: [a]"),
        "f.yaml:6: pools[0].backends[0].slot_save_path: found a list, allowed: text",
    ),
    "number in a list of texts": (
        with_backend("args: [--mlock, 3]"),
        "f.yaml:6: pools[0].backends[0].args[1]: found 3, allowed: text",
    ),
    "environment value that is a number": (
        with_backend("env:\n  GPUS: 0"),
        "f.yaml:7: pools[0].backends[0].env.GPUS: found 0, allowed: text",
    ),
    "unknown setting": (
        with_backend("slot: 4"),
        "f.yaml:6: pools[0].backends[0].slot: unknown setting, did you mean slots?",
    ),
    "unknown setting like none": (
        MINIMAL + "listen:\n  xyzzy: 1\n",
        "f.yaml:7: listen.xyzzy: unknown setting, allowed: host, port, public",
    ),
    "flag spelling": (
        with_backend("cache-ram: 4"),
        "f.yaml:6: pools[0].backends[0].cache-ram: unknown setting, did you mean cache_ram?",
    ),
    "no backends": (
        "pools:\n  - name: p\n",
        "f.yaml:2: pools[0].backends: missing, required: a list of sections",
    ),
    "empty backends": (
        "pools:\n  - name: p\n    backends: []\n",
        "f.yaml:3: pools[0].backends: found an empty list, allowed: at least one",
    ),
    "no pools": ("engine: embedded\n", "f.yaml:1: pools: missing, required: a list of sections"),
    "empty file": ("", "f.yaml:1: found nothing, allowed: at least pools (see configs/example.yaml)"),
    "a list": ("- a\n", "f.yaml:1: found a list, allowed: a section"),
    "a text": ("pools", 'f.yaml:1: found "pools", allowed: a section'),
    "not YAML": ("pools: [\n", "f.yaml:2: not YAML: expected the node content, but found '<stream end>'"),
    "tab": ("pools:\n\t- name: p\n", "f.yaml:2: not YAML: found character '\\t' that cannot start any token"),
    "two documents": ("a: 1\n---\nb: 2\n", "f.yaml:2: not YAML: but found another document"),
    "setting given twice": (
        with_backend("slots: 2\nslots: 4"),
        "f.yaml:7: pools[0].backends[0].slots: found a second time, allowed: once",
    ),
    "name that is a number": (
        MINIMAL + "8080: x\n",
        "f.yaml:6: found a name that is not text, allowed: a setting's name",
    ),
    "choice": (
        MINIMAL + "    scheduling: {queue: lifo}\n",
        'f.yaml:6: pools[0].scheduling.queue: found "lifo", allowed: one of reuse, fifo',
    ),
    "duration": (
        MINIMAL + "limits:\n  drain_timeout: soon\n",
        (
            'f.yaml:7: limits.drain_timeout: found "soon", '
            'allowed: a number of at least 0 or a duration such as "500ms", "30s", "5m", "1h"'
        ),
    ),
    "negative duration": (
        MINIMAL + "    scheduling:\n      max_wait: -1\n",
        (
            "f.yaml:7: pools[0].scheduling.max_wait: found -1, "
            'allowed: a number of at least 0 or a duration such as "500ms", "30s", "5m", "1h" or "auto"'
        ),
    ),
    "endless duration": (
        MINIMAL + "limits:\n  drain_timeout: .inf\n",
        (
            "f.yaml:7: limits.drain_timeout: found Infinity, "
            'allowed: a number of at least 0 or a duration such as "500ms", "30s", "5m", "1h"'
        ),
    ),
    "size": (
        MINIMAL + "limits:\n  max_body: 3 XB\n",
        (
            'f.yaml:7: limits.max_body: found "3 XB", '
            'allowed: an integer of at least 1 or a size such as "512KiB", "32MiB", "1GB"'
        ),
    ),
    "address with a path": (
        MINIMAL.replace("model: demo", "url: http://127.0.0.1:1/v1"),
        (
            'f.yaml:5: pools[0].backends[0].url: found "http://127.0.0.1:1/v1", '
            "allowed: http://HOST:PORT without a path"
        ),
    ),
    "neither model nor url": (
        "pools:\n  - name: p\n    backends:\n      - name: b\n",
        "f.yaml:4: pools[0].backends[0]: found neither model nor url, allowed: one of them",
    ),
    "model beside url": (
        with_backend("url: http://127.0.0.1:1"),
        (
            "f.yaml:5: pools[0].backends[0].model: found beside url, "
            "allowed: only in a backend that is launched here"
        ),
    ),
    "backend name twice": (
        with_backend("slots: 2") + "      - name: b\n        model: demo\n",
        'f.yaml:7: pools[0].backends[1].name: found "b" a second time, allowed: a name of its own',
    ),
    "alias of another pool": (
        MINIMAL + "  - name: q\n    aliases:\n      - p\n    backends: [{name: c, model: demo}]\n",
        'f.yaml:8: pools[1].aliases[0]: found "p" a second time, allowed: a name of its own',
    ),
    "two defaults": (
        MINIMAL
        + "    default: true\n  - name: q\n    default: true\n    backends: [{name: c, model: demo}]\n",
        "f.yaml:8: pools[1].default: found true as in pool p, allowed: one default pool",
    ),
    "public without keys": (
        MINIMAL + "listen:\n  host: 0.0.0.0\n",
        (
            'f.yaml:7: listen.host: found "0.0.0.0" without keys, '
            "allowed: a loopback address, or keys, or listen.public: true"
        ),
    ),
    "key without secret": (
        MINIMAL + "keys:\n  - name: ci\n",
        "f.yaml:7: keys[0]: found no secret, allowed: exactly one of value, env, file",
    ),
    "key with two sources": (
        MINIMAL + "keys:\n  - name: ci\n    env: A\n    file: b\n",
        "f.yaml:7: keys[0]: found env and file, allowed: exactly one of value, env, file",
    ),
    "two keys for one backend": (
        MINIMAL.replace("model: demo", "url: http://h:1") + "        api_key: a\n        api_key_env: B\n",
        (
            "f.yaml:7: pools[0].backends[0].api_key_env: found beside api_key, "
            "allowed: at most one of api_key, api_key_env, api_key_file"
        ),
    ),
    "isolation and a cache that all share": (
        with_backend("cache_ram: 64") + "endpoint:\n  isolation: true\n",
        "f.yaml:6: pools[0].backends[0].cache_ram: found 64 beside endpoint.isolation, allowed: 0",
    ),
    "isolation and an engine that may share": (
        MINIMAL.replace("model: demo", "url: http://h:1") + "endpoint:\n  isolation: true\n",
        (
            "f.yaml:5: pools[0].backends[0].url: found without cache_ram beside endpoint.isolation, "
            "allowed: with cache_ram: 0, where it runs with --cache-ram 0"
        ),
    ),
    "a cache that is not ours to set": (
        MINIMAL.replace("model: demo", "url: http://h:1") + "        cache_ram: 64\n",
        (
            "f.yaml:6: pools[0].backends[0].cache_ram: "
            "found 64 beside url, allowed: 0, which says that it has none"
        ),
    ),
    "certificates for plain HTTP": (
        MINIMAL.replace("model: demo", "url: http://h:1") + "        tls_ca: a\n",
        ("f.yaml:6: pools[0].backends[0].tls_ca: found beside an http address, allowed: beside an https one"),
    ),
    "certificates for a backend that is launched here": (
        with_backend("tls_ca: a"),
        "f.yaml:6: pools[0].backends[0].tls_ca: found beside model, allowed: only beside url",
    ),
    "two keys for a backend that is launched here": (
        with_backend("api_key: a\napi_key_file: B"),
        (
            "f.yaml:7: pools[0].backends[0].api_key_file: found beside api_key, "
            "allowed: at most one of api_key, api_key_env, api_key_file"
        ),
    ),
    "secret that is a number": (
        MINIMAL + "keys:\n  - name: ci\n    value: 12345678\n",
        "f.yaml:8: keys[0].value: found a value that is not shown, allowed: text",
    ),
    "section that contains itself": (
        "pools: &a\n  - *a\n",
        "f.yaml:1: found a section that contains itself, allowed: plain YAML",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_setting_gets_one_clear_line(name: str) -> None:
    text, line = WRONG[name]
    assert lines_of(text) == [line]


def test_every_wrong_setting_is_named_at_once() -> None:
    text = with_backend("slots: four\nthread: 2") + "listen: {port: 70000}\n"
    assert [line.split(": ")[1] for line in lines_of(text)] == [
        "pools[0].backends[0].slots",
        "pools[0].backends[0].thread",
        "listen.port",
    ]


def test_long_values_are_cut() -> None:
    (line,) = lines_of(with_backend(f"slots: {'x' * 5000}"))
    assert len(line) < 200


def test_a_minimal_file_gets_the_defaults() -> None:
    config, _ = parse(MINIMAL)
    pool = config.default_pool
    backend = pool.backends[0]
    assert (config.listen.host, config.listen.port) == ("127.0.0.1", 8080)
    assert (backend.slots, backend.context, backend.cache_ram) == (4, 4096, 0)
    assert pool.scheduling.max_wait == "auto"


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("30", 30), ("0.5", 0.5), ("500ms", 0.5), ("30s", 30), ("1.5 m", 90), ("2h", 7200)],
)
def test_durations(written: str, seconds: float) -> None:
    config, _ = parse(MINIMAL + f"limits: {{drain_timeout: {written}}}\n")
    assert config.limits.drain_timeout == seconds


@pytest.mark.parametrize(
    ("written", "size"), [("7", 7), ("1kB", 1000), ("1.5KiB", 1536), ("32 MiB", 2**25), ("1GB", 10**9)]
)
def test_sizes(written: str, size: int) -> None:
    config, _ = parse(MINIMAL + f"limits: {{max_body: {written}}}\n")
    assert config.limits.max_body == size


def test_anchors_and_merges_work() -> None:
    text = (
        "pools:\n  - name: p\n    backends:\n"
        "      - &one {name: a, model: demo, slots: 2}\n"
        "      - {<<: *one, name: b}\n"
    )
    config, _ = parse(text)
    assert [(b.name, b.slots) for b in config.pools[0].backends] == [("a", 2), ("b", 2)]


def test_the_pool_that_says_so_is_the_default() -> None:
    text = MINIMAL + "  - name: q\n    default: true\n    backends: [{name: c, model: demo}]\n"
    config, _ = parse(text)
    assert config.default_pool.name == "q"


def test_paths_start_at_the_files_folder(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        MINIMAL.replace("model: demo", "model: models/a.gguf\n        engine: bin/llama-server\n")
        + "        slot_save_path: saved\n"
        + "engine: llama-server\nstate: {path: run}\n"
    )
    config = load(file)
    assert config.state.path == str(tmp_path / "run")
    backend = config.pools[0].backends[0]
    assert backend.model == str(tmp_path / "models/a.gguf")
    assert backend.engine == str(tmp_path / "bin/llama-server")
    assert backend.slot_save_path == str(tmp_path / "saved")
    assert config.engine == "llama-server"


def test_secrets_come_from_file_environment_and_text(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from-file\n")
    file = tmp_path / "c.yaml"
    file.write_text(
        MINIMAL
        + "keys:\n  - {name: a, value: in-text}\n  - {name: b, env: MY_KEY}\n  - {name: c, file: secret}\n"
    )
    config = load(file, env={"MY_KEY": "from-env"})
    secrets = [key.value.get_secret_value() for key in config.keys if key.value is not None]
    assert secrets == ["in-text", "from-env", "from-file"]
    assert not any(secret in repr(config) for secret in secrets)


def test_a_secret_has_one_holder(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    keys = "keys:\n  - {name: a, value: same}\n  - {name: b, value: other}\n  - {name: c, env: MY_KEY}\n"
    file.write_text(MINIMAL + keys)
    with pytest.raises(ConfigError) as caught:
        load(file, env={"MY_KEY": "same"})
    assert caught.value.lines == [
        f"{file}:9: keys[2].env: found for c the secret of a, allowed: a secret of its own"
    ]


@pytest.mark.parametrize(
    ("setting", "found", "reads"),
    [
        (
            "slots: 010",
            "slots: found 010, which YAML reads as an octal number, as 8",
            "an integer from 1 to 256",
        ),
        ("slots: 1:30", "slots: found 1:30, which YAML reads in sixties, as 90", "an integer from 1 to 256"),
        (
            "start_timeout: 1:30.5",
            "start_timeout: found 1:30.5, which YAML reads in sixties, as 90.5",
            "a number of",
        ),
        ("args: [-b, 010]", "args[1]: found 010, which YAML reads as an octal number, as 8", "text"),
        (
            "strange: 0_1",
            "strange: found 0_1, which YAML reads as an octal number, as 1",
            "numbers in decimal",
        ),
    ],
)
def test_numbers_that_yaml_reads_otherwise_than_people_are_refused(
    setting: str, found: str, reads: str
) -> None:
    (line,) = lines_of(with_backend(setting))
    assert line.startswith(f"f.yaml:6: pools[0].backends[0].{found}, allowed: {reads}")


def test_numbers_and_texts_that_only_look_like_those_are_taken() -> None:
    config, _ = parse(with_backend("slots: 0x10\nthreads: 8\nstart_timeout: 0\nargs: ['010', \"1:30\"]"))
    backend = config.pools[0].backends[0]
    assert (backend.slots, backend.start_timeout, backend.args) == (16, 0, ("010", "1:30"))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "env: MISSING",
            'keys[0].env: found "MISSING", which is not set, allowed: a variable that holds the key',
        ),
        (
            "file: nowhere",
            (
                'keys[0].file: found "nowhere" (No such file or directory), '
                "allowed: a readable file that holds the key"
            ),
        ),
        (
            "value: two words",
            (
                "keys[0].value: found a secret that no HTTP header can carry, "
                "allowed: printable ASCII without spaces"
            ),
        ),
        (
            "env: EMPTY",
            (
                "keys[0].env: found a secret that no HTTP header can carry, "
                "allowed: printable ASCII without spaces"
            ),
        ),
    ],
)
def test_secrets_that_cannot_be_had(tmp_path: Path, key: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(MINIMAL + f"keys:\n  - name: a\n    {key}\n")
    with pytest.raises(ConfigError) as caught:
        load(file, env={"EMPTY": ""})
    assert caught.value.lines == [f"{file}:8: {message}"]


REMOTE = "pools:\n  - name: p\n    backends:\n      - name: b\n        url: https://box:1\n"


def test_what_lets_the_router_in_at_a_remote_backend_is_resolved_and_hidden(tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    (tmp_path / "key").write_text("a-secret\n")
    for source in ("api_key: a-secret", "api_key_env: BOX", "api_key_file: key"):
        file = tmp_path / "c.yaml"
        file.write_text(f"{REMOTE}        {source}\n        tls_ca: ca.pem\n")
        config = load(file, env={"BOX": "a-secret"})
        backend = config.pools[0].backends[0]
        assert backend.api_key is not None
        assert backend.api_key.get_secret_value() == "a-secret"
        assert backend.tls_ca == str(tmp_path / "ca.pem")
        shown = dump(config)
        assert "a-secret" not in shown + repr(config)
        assert ("**********" in shown) is (source == "api_key: a-secret")
        assert "tls_ca: " in shown


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "api_key_env: MISSING",
            'api_key_env: found "MISSING", which is not set, allowed: a variable that holds the key',
        ),
        (
            "api_key: two words",
            "api_key: found a secret that no HTTP header can carry, allowed: printable ASCII without spaces",
        ),
        (
            "tls_ca: nowhere",
            (
                'tls_ca: found "nowhere" (No such file or directory), '
                "allowed: a readable PEM file of certificates"
            ),
        ),
        (
            "tls_ca: c.yaml",
            'tls_ca: found "c.yaml" (no certificates), allowed: a readable PEM file of certificates',
        ),
        ("api_key: 17", "api_key: found a value that is not shown, allowed: text"),
    ],
)
def test_access_that_cannot_be_had(tmp_path: Path, setting: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"{REMOTE}        {setting}\n")
    with pytest.raises(ConfigError) as caught:
        load(file, env={})
    assert caught.value.lines == [f"{file}:6: pools[0].backends[0].{message}"]


def test_a_missing_file_and_a_binary_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory, allowed: a readable YAML file"):
        load(tmp_path / "none.yaml")
    file = tmp_path / "binary.yaml"
    file.write_bytes(b"pools: \xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(file)


def test_aliases_of_aliases_do_not_hold_anybody_up(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    file = tmp_path / "bomb.yaml"
    file.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ConfigError, match="aliases within aliases") as caught:
        load(file)
    assert str(caught.value).startswith(f"{file}:")


def test_a_remote_backend_without_a_cache_may_be_isolated(tmp_path: Path) -> None:
    text = MINIMAL.replace("model: demo", "url: http://h:1") + "        cache_ram: 0\n"
    file = tmp_path / "f.yaml"
    file.write_text(text + "endpoint:\n  isolation: true\n")
    config = load(file)
    shown = tmp_path / "shown.yaml"
    shown.write_text(dump(config))
    assert load(shown).pools[0].backends[0].model_fields_set >= {"url", "cache_ram"}
    file.write_text(text.replace("        cache_ram: 0\n", ""))
    assert "cache_ram" not in dump(load(file))


def test_a_shared_context_is_shown_where_it_was_told(tmp_path: Path) -> None:
    text = MINIMAL.replace("model: demo", "url: http://h:1") + "        kv_unified: true\n"
    file, shown = tmp_path / "f.yaml", tmp_path / "shown.yaml"
    file.write_text(text)
    shown.write_text(dump(load(file)))
    assert load(shown).pools[0].backends[0].kv_unified
    file.write_text(MINIMAL)
    assert "kv_unified: false" in dump(load(file))
