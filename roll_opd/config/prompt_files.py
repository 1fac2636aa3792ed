"""Other names of `roll_opd.data.files.find_files` and of `roll_opd.data.preview`."""

from roll_opd.data.files import find_files as find_prompt_files
from roll_opd.data.preview import ROWS_SCANNED, count_rows
from roll_opd.data.preview import first_tags as tags_in
from roll_opd.data.rows import DEFAULT_TAG

__all__ = ["DEFAULT_TAG", "ROWS_SCANNED", "count_rows", "find_prompt_files", "tags_in"]
