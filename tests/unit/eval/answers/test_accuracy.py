"""Which questions are answered while training: those about whole images, drawn by the seed."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from lookonce.eval.answers.accuracy import draw

RECORDS = st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=2, unique=True), st.integers(1, 4)), min_size=1)


@given(RECORDS, st.integers(1, 30), st.integers(0, 3))
def test_a_part_has_whole_images_and_at_most_as_many_questions(drawn, most, seed):
    records = [SimpleNamespace(number=number, turns=[None] * turns) for number, (_, turns) in enumerate(drawn)]
    images = [[str(image) for image in some] for some, _ in drawn]
    part = draw(records, images, most, seed)
    numbers = [record.number for record in part]
    assert numbers == sorted(set(numbers)) and numbers
    of_image = Counter(image for some in images for image in some)
    chosen = Counter(image for number in numbers for image in images[number])
    assert all(of_image[image] == number for image, number in chosen.items())
    num_questions = sum(len(record.turns) for record in part)
    assert num_questions <= most or draw(part, [images[number] for number in numbers], 1, seed) == part
    assert draw(records, images, most, seed) == part
    assert most < sum(turns for _, turns in drawn) or part == records


def test_another_seed_draws_other_images():
    records = [SimpleNamespace(turns=[None]) for _ in range(20)]
    images = [[str(number)] for number in range(20)]
    first, second = ([id(record) for record in draw(records, images, 10, seed)] for seed in (0, 1))
    assert len(first) == len(second) == 10 and first != second
