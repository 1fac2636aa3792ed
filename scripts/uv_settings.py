"""Convert the output of `pip config list` to uv's environment variables for the same indexes (NAME=value lines)."""

import ast
import sys

VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}
SECTIONS = ("global", "install", ":env:")  # each file overrides the previous files


def uv_settings(lines: list[str]) -> dict[str, str]:
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as in pip: the best version in any index
    for section in SECTIONS:
        for line in lines:
            key, _, value = line.partition("=")
            variable = VARIABLES.get(key.removeprefix(f"{section}."))
            if variable:
                separator = "," if variable == "UV_FIND_LINKS" else " "
                found[variable] = separator.join(ast.literal_eval(value).split())
    return found


if __name__ == "__main__":
    print(*(f"{name}={value}" for name, value in uv_settings(sys.stdin.read().splitlines()).items()), sep="\n")
