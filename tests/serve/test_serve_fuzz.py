"""A thousand malformed bodies, made from the schema: each is refused with the error object, and the server goes on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from nextscale.serve.schema import ImageRequest
from tests.helpers.serving import PATH, Live, live
from tests.helpers.tiny import shared_pipeline

BODIES = 1000
VALID: dict[str, Any] = {"prompt": "a fox"}
FIELDS = list(ImageRequest.model_fields)
NOISE: tuple[Any, ...] = (
    *("", "\x00", "é" * 40, "x" * 5000, "../../etc/passwd", "{}", "'; drop table", "1e999", "-1", "NaN", "\u202e", "a\nb"),
    *(-1, -(2**70), 2**63, 10**400, 0.5, -0.0, 1e308, True, False),
    *([], [[]], [None], [1] * 200, ["a", 1], {}, {"a": {"b": []}}, {"$ref": "#"}),
)


def wrong_value(field: str, rng: random.Random) -> Any:
    """A value that the field's own schema does not allow, or one of noise that does not fit it."""
    while True:
        value = rng.choice(NOISE)
        try:
            ImageRequest.model_validate_json(json.dumps({**VALID, field: value}))
        except ValueError:
            return value


def mutated(rng: random.Random) -> bytes:
    match rng.randrange(8):
        case 0 | 1 | 2 | 3:
            field = rng.choice(FIELDS)
            return json.dumps({**VALID, field: wrong_value(field, rng)}).encode()
        case 4:
            return json.dumps({**VALID, "".join(rng.choices("abcxyz_$.\u00e9", k=rng.randint(1, 30))) + "?": rng.choice(NOISE)}).encode()
        case 5:
            fields = rng.sample([field for field in FIELDS if field != "prompt"], 3)
            return json.dumps({field: rng.choice(NOISE) for field in fields}).encode()  # no prompt
        case 6:
            text = json.dumps({**VALID, "seed": [1, 2], "n": 2}).encode()
            broken = bytearray(text[: rng.randrange(len(text) - 1)])
            if broken and rng.random() < 0.5:
                broken[rng.randrange(len(broken))] = rng.randrange(128, 256)
            return bytes(broken)
        case _:
            depth = rng.randint(10, 3000)
            return rng.choice(
                (b"[" * depth, b'{"prompt":' * depth + b"1" + b"}" * depth, json.dumps(rng.choice(NOISE)).encode(), b"\x00" * depth)
            )


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live({"tiny": shared_pipeline("infinity")}) as running:
        yield running


def test_malformed_bodies_are_refused_with_the_error_object(server: Live) -> None:
    rng = random.Random(17)
    for number in range(BODIES):
        body = mutated(rng)
        answer = server.ask(PATH, body, method="POST")
        assert 400 <= answer.status < 500, (number, body[:200], answer.body)
        assert set(answer.error) == {"message", "type", "param", "code"} and answer.error["message"], (number, body[:200])
        assert answer.headers["x-request-id"]
        assert b"Traceback" not in answer.body
    assert server.generate(**VALID).status == 200


def test_methods_of_strangers_never_break_the_server(server: Live) -> None:
    rng = random.Random(3)
    letters = "abcdefghijklmnopqrstuvwxyz:=,.+-[]{}()'\" 0123456789"
    names = ["skip:last=", "sparsevar:tau=", "fastvar:ratios=", "stagevar:alphas=", "tome:", "stagevar:"]
    values = ["{}", "[]", "(1,)", "'x'", "1e400", "-1", "{1:2}", "{1:{}}", "[[1]]", "none", "true", "((((1", "9" * 60]
    for _ in range(200):
        guess = rng.choice(names) + rng.choice(values) if rng.random() < 0.6 else "".join(rng.choices(letters, k=rng.randint(1, 60)))
        answer = server.generate(prompt="a fox", seed=1, method=guess)
        assert answer.status == 200 or (answer.status == 400 and answer.error["param"] == "method"), (guess, answer.body[:300])
