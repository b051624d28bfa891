# SPDX-License-Identifier: Apache-2.0
"""The formats of strings that can be enforced, as regular expressions.

Each takes valid texts only, not all of them: no leap seconds, years of four digits, labels of at most 40 characters.
Readers differ at the edges of every format, and an answer has to be valid for all of them.
"""

from __future__ import annotations

_MONTHS = r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
_LEAP_YEAR = r"(?:[1-9]\d(?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_DATE = rf"(?:[1-9]\d{{3}}-{_MONTHS}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_N = r"\d{1,6}"
_HOURS = rf"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DAYS = rf"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,38}[A-Za-z0-9])?"
_LAST_LABEL = r"[A-Za-z](?:[A-Za-z0-9-]{0,38}[A-Za-z0-9])?"
_HOST = rf"(?:{_LABEL}\.){{0,4}}{_LAST_LABEL}"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_H = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join([
    f"(?:{_H}:){{7}}{_H}", f"(?:{_H}:){{1,7}}:", f"(?:{_H}:){{1,6}}:{_H}",
    *(f"(?:{_H}:){{1,{6 - n}}}(?::{_H}){{1,{n + 1}}}" for n in range(1, 6)),
    f":(?:(?::{_H}){{1,7}}|:)",
])  # fmt: skip
_PERCENT = "%[0-9A-Fa-f]{2}"
_SEGMENT = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_PERCENT})"
_NO_COLON = rf"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|{_PERCENT})"
_TAIL = rf"(?:\?(?:{_SEGMENT}|[/?])*)?(?:#(?:{_SEGMENT}|[/?])*)?"
_ROOTLESS = rf"{_SEGMENT}+(?:/{_SEGMENT}*)*"
_AUTHORITY = rf"//{_HOST}(?::\d{{1,4}})?(?:/{_SEGMENT}*)*"
_SCHEME = "[A-Za-z][A-Za-z0-9+.-]+:"
_URI = rf"{_SCHEME}(?:{_AUTHORITY}|{_ROOTLESS}){_TAIL}"
_REFERENCE = rf"(?:{_SCHEME})?(?:{_AUTHORITY}|/(?:{_ROOTLESS})?|{_NO_COLON}+(?:/{_SEGMENT}*)*)?{_TAIL}"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"

FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": rf"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|{_N}W)",
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@(?:{_LABEL}\.){{1,4}}[A-Za-z]{{2,24}}",
    "hostname": _HOST,
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "ipv6": _IPV6,
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": _URI,
    "uri-reference": _REFERENCE,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d{{0,5}})(?:#|{_POINTER})",
}
FREE_FORMATS = frozenset({"password", "path", "binary"})
"""They say what a text is for and nothing of the text."""
