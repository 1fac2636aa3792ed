"""Which language a text is in, by the package langdetect, which IFEval's authors use; users install it on demand."""

import threading

from roll_opd.rewards.interface import RewardError

# langdetect strips addresses with patterns that are quadratic, so it sees the two ends of a long text
LOOKED_AT = 2_000  # characters of each end
SEED = 0  # langdetect samples; seeded, the same text is always in the same language

_LOADING = threading.Lock()


class LanguageUnknown(RewardError):
    """langdetect is not there to ask."""


def is_language(text: str, language: str) -> bool:
    """Whether `text` is in `language` (ISO 639-1, "zh" for each Chinese script); False where nothing can be told.

    Raises `LanguageUnknown` where langdetect is not installed.
    """
    try:
        import langdetect.detector_factory as langdetect
        from langdetect.lang_detect_exception import LangDetectException
    except ImportError:
        raise LanguageUnknown(
            "the language of a response is found by langdetect, which is not installed; `pip install langdetect`, or"
            " leave out the rows with language:response_language and validate_response_language"
        ) from None
    with _LOADING:
        langdetect.init_factory()
    detector = langdetect._factory.create()
    detector.seed = SEED
    detector.append(text if len(text) <= 2 * LOOKED_AT else f"{text[:LOOKED_AT]} {text[-LOOKED_AT:]}")
    try:
        found = detector.detect()
    except LangDetectException:  # no letters
        return False
    return language in (found, found.partition("-")[0])
