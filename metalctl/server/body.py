"""From the bytes of a request to its checked parameters."""

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from metalctl.server.errors import ApiError, bad_request

READ_TIMEOUT = 30.0  # seconds that a client may take to send its body


class Parameters(BaseModel):
    """What a request may hold: nothing is taken that is not declared, and no type is guessed."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True, protected_namespaces=())


P = TypeVar("P", bound=Parameters)


async def read(request: Request, kind: type[P], refused: Mapping[str, str] | None = None) -> P:
    """The request's parameters. `refused` holds those of the published API that are not served, with the reason.

    Raises ApiError 400, naming the parameter, for what is malformed, unknown or refused; 408 for a body that does not
    arrive.
    """
    try:
        data = await asyncio.wait_for(request.body(), READ_TIMEOUT)
    except TimeoutError:
        raise ApiError(408, "the body of the request did not arrive in time.") from None
    except ClientDisconnect:
        raise ApiError(499, "the client went away.") from None
    return check(parse(data), kind, refused or {})


def parse(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`. NaN, infinities, deep nesting, broken UTF-8 and half surrogates are refused."""
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object.", code="invalid_json")
    return value


def check(values: dict[str, Any], kind: type[P], refused: Mapping[str, str]) -> P:
    """`values` as `kind`. A value of null is one that was not given."""
    given = {name: value for name, value in values.items() if value is not None}
    for name in given.keys() & refused.keys():
        raise bad_request(f"{name} is not supported: {refused[name]}", name, "unsupported")
    unknown = sorted(name for name in given if name not in _names(kind))
    if unknown:
        raise bad_request(f"{unknown[0]} is not a parameter of this request.", unknown[0], "unknown_parameter")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _explained(error, given) from None


def _names(kind: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in kind.model_fields.items()}


def _explained(error: ValidationError, values: dict[str, Any]) -> ApiError:
    """The failure that is deepest in the request: of the branches of a union, the one that came furthest."""
    found = [(_path(values, detail["loc"]), detail) for detail in error.errors(include_url=False, include_input=False)]
    path, detail = max(found, key=lambda entry: entry[0].count("."))
    return bad_request(f"{path}: {detail['msg']}" if path else detail["msg"], path or None, detail["type"])


def _path(values: Any, location: tuple[int | str, ...]) -> str:
    """The steps of a location that lead through the request itself, without the names of types in between."""
    steps: list[str] = []
    for index, step in enumerate(location):
        inside = (isinstance(values, dict) and step in values) or (
            isinstance(values, list) and isinstance(step, int) and step < len(values)
        )
        if inside:
            values = values[step]
            steps.append(str(step))
        elif index == len(location) - 1 and isinstance(values, dict) and isinstance(step, str):
            steps.append(step)
    return ".".join(steps)
