"""docs/configuration.md equals the declarations of the keys."""

import configuration_page


def test_the_page_is_what_the_declarations_make() -> None:
    assert configuration_page.PAGE.read_text(encoding="utf-8") == configuration_page.page(), "run `make docs`"


def test_every_key_has_a_meaning() -> None:
    for section in configuration_page.sections():
        assert "|  |  |" not in configuration_page.table(section)
