"""The command `roll-opd push`: upload the model of a run, with its card, to a repository of a model hub."""

import argparse
import re
import sys
from pathlib import Path

from roll_opd.base.command_line import DONE, FAILED, USER_ERROR
from roll_opd.base.failures import ConfigError, excerpt, of_a_service
from roll_opd.base.terminal import echo
from roll_opd.commands.main import Command
from roll_opd.extras.after_run.finished_model import NotUsable, add_place, finished_model
from roll_opd.extras.report.run_files import NoRun
from roll_opd.models.model_info import ModelFilesError

CARD = "README.md"
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    parser.add_argument("repo", metavar="REPO", help="name of the repository, owner/name; it is made if it is missing")
    parser.add_argument("--public", action="store_true", help="make a new repository public (default: private)")
    parser.add_argument("--revision", metavar="BRANCH", help="branch for the files (default: the main branch)")


def _push(arguments: argparse.Namespace) -> int:
    """Upload the files. The token is that of HF_TOKEN, or of `hf auth login`; the command needs no answers."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    repo = arguments.repo
    try:
        if not REPO.fullmatch(repo):
            raise NotUsable(f"REPO {repo!r} is not a name of the form owner/name; correct it")
        found = finished_model(Path(arguments.run), arguments.step, with_plan=False)
        if not (found.path / CARD).is_file():
            raise NotUsable(
                f"{found.path} has no model card ({CARD}); write one there, so that readers know the origin"
            )
        api = HfApi(library_name="roll_opd")
        if api.repo_exists(repo) and not arguments.public and not api.repo_info(repo).private:
            raise NotUsable(f"{repo} exists and is public; make it private, name another, or push with --public")
        url = api.create_repo(repo, private=not arguments.public, exist_ok=True)
        is_private = api.repo_info(repo).private
        if arguments.revision:
            api.create_branch(repo, branch=arguments.revision, exist_ok=True)
        message = f"{found.title}, uploaded by roll-opd push"
        done = api.upload_folder(
            repo_id=repo, folder_path=found.path, revision=arguments.revision, commit_message=message
        )
    except (ConfigError, ModelFilesError, NoRun, NotUsable) as error:
        echo(f"roll-opd: {error}", sys.stderr)
        return USER_ERROR
    except LocalTokenNotFoundError:
        echo("roll-opd: there is no token of the model hub; set HF_TOKEN, or run `hf auth login`", sys.stderr)
        return USER_ERROR
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        remedy = {
            401: "the token is missing or not valid; set HF_TOKEN, or run `hf auth login`",
            403: f"the token may not write to {repo}; use a token with the right to write, or another owner",
        }.get(status or 0, "try again later, or check HF_ENDPOINT")
        echo(f"roll-opd: {repo} could not be written: {excerpt(str(error))}; {remedy}", sys.stderr)
        return USER_ERROR if status in (401, 403) else FAILED
    except Exception as error:  # the client raises errors of its HTTP library
        if not of_a_service(error):
            raise
        echo(f"roll-opd: {repo} could not be written: {excerpt(str(error))}; check the network", sys.stderr)
        return FAILED
    state = "private" if is_private else "public"
    echo(f"{url} ({state}) has {found.title} since commit {done.oid}")
    return DONE


PUSH = Command("upload the model of a run, with its card, to a model hub", _arguments, _push, needs_engines=False)
