"""Excerpts of the answers of servers: short, in one line, and without the markup of pages."""

import json
import time

from roll_opd.base.failures import LENGTH, excerpt

NGINX = """<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n<body>\r\n<center><h1>502 Bad Gateway</h1></center>
<hr><center>nginx/1.18.0 (Ubuntu)</center>\r\n</body>\r\n</html>\r\n"""
LONG_PAGE = f"""<!-- cached --><!DOCTYPE html><html lang="en"><head><style>{"a > b {color: red} " * 2000}</style>
<script>if (1 < 2) document.title = "<title>x</title>"</script><title lang=en>
  Gateway &amp; time-out </title></head><body>{"<p>try later</p>" * 500}</body></html>"""


def test_of_a_page_only_the_title_is_left() -> None:
    assert excerpt(NGINX) == "502 Bad Gateway"
    assert excerpt(LONG_PAGE) == "Gateway & time-out"
    assert excerpt("<html><head><title></title></head><body><h1>Not <b>here</b></h1></body></html>") == "Not here"
    assert excerpt("<body>no such <i>model</i></body>") == "no such model"


def test_long_bodies_are_one_short_line() -> None:
    body = json.dumps({"detail": [{"loc": ["body", n], "msg": "too\n  long"} for n in range(5000)]}, indent=1)
    for text in (
        body,
        "x" * 10**7,
        "<" * 10**5,
        "<html" * 10**4,
        "<title>" * 10**4,
        "<!--" * 10**4,
        "\n" * 10**5 + "y",
    ):
        began = time.perf_counter()
        found = excerpt(text)
        assert len(found) <= LENGTH and "\n" not in found
        assert time.perf_counter() - began < 1
    assert excerpt(body).startswith('{ "detail": [ {') and excerpt(body).endswith("...")
    assert (
        excerpt('{"error": "x < y"}') == '{"error": "x < y"}' and excerpt("a <b> c") == "a <b> c" and excerpt("") == ""
    )
