"""`lookonce export`: a run's answers in the form of a challenge. The work is done in `eval.submission`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lookonce.commands.options import JSON, PATH, SPLIT, emit, notify, remember_run_file
from lookonce.text import shell

if TYPE_CHECKING:
    from lookonce.eval.submission import Challenge


@click.command()
@click.argument("run_dir", metavar="RUN", type=PATH)
@click.option("--to", "challenge", type=click.Choice(["medico", "medvqa-gi"]), required=True, help="The challenge.")
@SPLIT
@click.option("--info", "info_file", type=PATH, metavar="FILE", help="YAML or JSON with the keys of submission_info.")
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="FILE",
    default=Path("predictions_1.json"),
    show_default=True,
    help="File to write; it must not exist.",
)
@click.option("--partial", is_flag=True, help="Write the file although rows that the challenge scores are missing.")
@JSON
def export(
    run_dir: Path,
    challenge: Challenge,
    split: str | None,
    info_file: Path | None,
    output: Path,
    partial: bool,
    as_json: bool,
) -> None:
    """Write a run's answers as the submission JSON of a challenge.

    medico is task 1 of MediaEval Medico, medvqa-gi task 1 of ImageCLEFmed MEDVQA-GI. The file has the keys of the
    challenges' own scripts, with the public scores of the answers; these need the extra `metrics`.

    --info names the participants: Participant_Names, Affiliations, Contact_emails (a list), Team_Name, Country and
    Notes_to_organizers. An image's id is its file name without suffix.

    Fails if questions of the split are not answered, or medico's public rows are not complete, unless --partial is
    given.

    \b
    Examples:
      lookonce export runs/x1 --to medico --split test --info team.yaml
      lookonce export runs/kvasir --to medvqa-gi --split test -o submission.json
    """
    from lookonce.errors import UsageError
    from lookonce.eval.answers.files import AnsweringCost
    from lookonce.eval.join import find_predictions
    from lookonce.eval.scores.prediction import read_predictions
    from lookonce.eval.submission import SubmissionInfo, lacks, notes, submission, to_text
    from lookonce.files import create_text
    from lookonce.run.folder import claimed_around
    from lookonce.run.open import Needs, open_run
    from lookonce.run.records import read_split
    from lookonce.settings import read_settings

    remember_run_file(run_dir)
    opened = open_run(run_dir, Needs("lookonce export", recorded=True))
    folder, run = opened.folder, opened.run
    with claimed_around(output, "lookonce export"):
        split = split or run.eval.split
        predictions = read_predictions(find_predictions(folder, split))
        info, expected = SubmissionInfo(), f"a mapping of {', '.join(SubmissionInfo.model_fields)}"
        if info_file:
            info = read_settings(
                info_file, SubmissionInfo, f"submission info {info_file}", "name another file", expected
            )
        are_here = all(path.exists() for path in getattr(run.data, split, ()))
        records = [*read_split(run, split)] if split in ("val", "test") and are_here else []
        missing = lacks(predictions, challenge, records)
        if missing and not partial:
            raise UsageError(
                f"{missing}; answer all with: {shell('lookonce', 'eval', run_dir, '--split', split)}, or export what "
                "there is with --partial"
            )
        value = submission(predictions, challenge, info, AnsweringCost.read(folder.answering(split)))
        if not create_text(output, to_text(value)):
            raise UsageError(f"{output} exists; name another file with -o, or remove it")
    for note in dict.fromkeys(filter(None, [missing, *notes(value, challenge)])):
        notify(note)
    written = {"file": str(output), "num_answers": len(predictions), "public_scores": value["public_scores"]}
    emit(written, f"wrote {len(predictions):,} answers to {output}", as_json)
