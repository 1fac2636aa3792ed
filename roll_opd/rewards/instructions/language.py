"""Which language a text is in, by the package langdetect, which IFEval's authors use."""

import threading
from typing import Any

from langdetect import detector_factory
from langdetect.lang_detect_exception import LangDetectException

# langdetect strips addresses with patterns that are quadratic, so it sees the two ends of a long text
LOOKED_AT = 2_000  # characters of each end
SEED = 0  # langdetect samples; seeded, the same text is always in the same language

_LOADING = threading.Lock()


def is_language(text: str, language: str) -> bool:
    """Return whether `text` is in `language` (ISO 639-1, "zh" for each Chinese script); False where it cannot tell."""
    with _LOADING:
        detector_factory.init_factory()
    factory: Any = detector_factory._factory  # set by `init_factory`
    detector = factory.create()
    detector.seed = SEED
    detector.append(text if len(text) <= 2 * LOOKED_AT else f"{text[:LOOKED_AT]} {text[-LOOKED_AT:]}")
    try:
        found = detector.detect()
    except LangDetectException:  # no letters
        return False
    return language in (found, found.partition("-")[0])
