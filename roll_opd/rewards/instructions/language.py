"""Language detection by langdetect, as IFEval's authors use."""

import threading
from typing import Any

from langdetect import detector_factory
from langdetect.lang_detect_exception import LangDetectException

# langdetect has quadratic patterns, so only both ends of a long text are searched
SEARCHED = 2_000  # characters of each end
SEED = 0  # langdetect samples; a seed makes it deterministic

_LOADING = threading.Lock()


def is_language(text: str, language: str) -> bool:
    """Return whether `text` is in `language` (ISO 639-1, "zh" for each Chinese script); False if undetectable."""
    with _LOADING:
        detector_factory.init_factory()
    factory: Any = detector_factory._factory  # set by `init_factory`
    detector = factory.create()
    detector.seed = SEED
    detector.append(text if len(text) <= 2 * SEARCHED else f"{text[:SEARCHED]} {text[-SEARCHED:]}")
    try:
        found = detector.detect()
    except LangDetectException:  # no letters
        return False
    return language in (found, found.partition("-")[0])
