"""Excerpts of the answers of servers for messages."""

import html
import re

LENGTH = 300  # maximum characters of an excerpt
READ = 100_000  # characters of an answer in which the title of a page is searched
_IS_PAGE = re.compile(
    r"\s*(<\?xml[^>]*>\s*|<!--.*?-->\s*)*<(!doctype\s+html|html|head|title|body|center|h1)\b", re.I | re.S
)
# an element without an end reaches to the end of the text, so that a search takes linear time
_TITLE = re.compile(r"<(title|h1)\b[^>]*>(.*?)(?:</\1\s*>|\Z)", re.I | re.S)
_HIDDEN = re.compile(r"<(script|style)\b.*?(?:</\1\s*>|\Z)|<!--.*?(?:-->|\Z)", re.I | re.S)
_TAG = re.compile(r"<[^>]*>?")


def excerpt(text: str, most: int = LENGTH) -> str:
    """Return the beginning of a text in one line of at most `most` characters, and "..." if the text is longer.

    Of an HTML page, only the title is returned, or the text without tags if the page has no title.
    """
    text = text[:READ]
    if _IS_PAGE.match(text):
        text = _page_text(text)
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3].rstrip() + "..."


def _page_text(page: str) -> str:
    page = _HIDDEN.sub(" ", page)
    titles = (_TAG.sub(" ", found[2]) for found in _TITLE.finditer(page))
    title = next((one for one in titles if one.strip()), None)
    return html.unescape(_TAG.sub(" ", page) if title is None else title)
