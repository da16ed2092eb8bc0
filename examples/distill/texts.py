"""What the text example and its plain counterpart share: texts that are on every machine, a teacher, and a student.

The texts are paragraphs of the docstrings of Python's own library; the class is the package that they come from. So
nothing is downloaded, and numbers vary with Python's version. Only 800 paragraphs keep their label for the student; the
teacher has learned from all of the training set. The teacher is no torch module: scikit-learn counts words and letters,
and a logistic regression weighs them.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from scipy import sparse
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import LogisticRegression

CLASSES, MOST_PER_CLASS, LEAST_WORDS = 12, 900, 6
LABELLED = 800
LONGEST, MOST_WORDS, BUCKETS, WIDTH = 320, 48, 1024, 32
# Bytes of a paragraph that travel to the teacher; words that the student reads, each as one of 1,024 numbers.
GLOBAL_BATCH, MICRO_BATCH = 128, 64
TEMPERATURE, WEIGHT, LEARNING_RATE = 2.0, 0.9, 0.01
FOLDER = Path("runs/distill")


@dataclass(frozen=True)
class Texts:
    """Paragraphs as tensors, in a fixed order.

    Attributes:
        letters: UTF-8 of the paragraphs, filled up with 0; uint8, of shape (texts, 320).
        words: Numbers of their words from 1, filled up with 0; of shape (texts, 48).
        targets: Their classes, of shape (texts,).
    """

    letters: torch.Tensor
    words: torch.Tensor
    targets: torch.Tensor


def texts(folder: Path = FOLDER) -> tuple[Texts, Texts]:
    """The training set and the test set, a quarter; read from a file if an earlier call has written it."""
    path = folder / "texts.json"
    if path.exists():
        pairs = json.loads(path.read_text(encoding="utf-8"))
    else:
        pairs = collect(Path(sysconfig.get_path("stdlib")))
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{random.SystemRandom().randrange(1 << 32)}")
        unfinished.write_text(json.dumps(pairs), encoding="utf-8")
        unfinished.replace(path)
    count = len(pairs) * 3 // 4
    return as_tensors(pairs[:count]), as_tensors(pairs[count:])


def collect(library: Path) -> list[tuple[str, int]]:
    """Paragraphs of the docstrings of the 12 packages that have most, with the numbers of these, in a random order."""
    found: dict[str, set[str]] = {}
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # samples of other encodings and of errors
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                paragraphs = (" ".join(text.split()) for text in (ast.get_docstring(node) or "").split("\n\n"))
                found.setdefault(parts[0], set()).update(
                    text for text in paragraphs if len(text.split()) >= LEAST_WORDS
                )
    largest = sorted(found, key=lambda name: (-len(found[name]), name))[:CLASSES]
    chance = random.Random(0)
    seen: set[str] = set()
    pairs = []
    for number, name in enumerate(largest):
        fresh = sorted(found[name] - seen)
        seen |= found[name]
        pairs += [(text, number) for text in chance.sample(fresh, min(MOST_PER_CLASS, len(fresh)))]
    chance.shuffle(pairs)
    return pairs


def as_tensors(pairs: list[tuple[str, int]]) -> Texts:
    """Paragraphs and their classes as tensors."""
    letters = torch.zeros(len(pairs), LONGEST, dtype=torch.uint8)
    words = torch.zeros(len(pairs), MOST_WORDS, dtype=torch.int64)
    for row, (text, _) in enumerate(pairs):
        content = text.encode()[:LONGEST]
        letters[row, : len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        numbers = [1 + zlib.crc32(word.lower().encode()) % BUCKETS for word in text.split()[:MOST_WORDS]]
        words[row, : len(numbers)] = torch.tensor(numbers)
    return Texts(letters, words, torch.tensor([target for _, target in pairs]))


def known(targets: torch.Tensor) -> torch.Tensor:
    """The targets with -1 for all but the first 800."""
    return torch.where(torch.arange(len(targets)) < LABELLED, targets, -1)


def features(letters: torch.Tensor) -> sparse.csr_matrix:
    """Counts of words, pairs of words, and sequences of three and four letters."""
    decoded = [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in letters]
    by_word = HashingVectorizer(n_features=1 << 15, ngram_range=(1, 2), norm=None, alternate_sign=False)
    by_letter = HashingVectorizer(
        analyzer="char_wb", n_features=1 << 15, ngram_range=(3, 4), norm=None, alternate_sign=False
    )
    return sparse.hstack([by_word.transform(decoded), by_letter.transform(decoded)], format="csr")


class TextTeacher:
    """A callable that answers with a score for each class; ``edl-hvd teach`` serves it as it serves a module.

    Args:
        rarity: How rare each feature is, in texts; the less frequent, the larger.
        weights: Weights, of shape (classes, features).
        bias: Bias of each class.
    """

    def __init__(self, rarity: numpy.ndarray, weights: numpy.ndarray, bias: numpy.ndarray) -> None:
        self.rarity, self.weights, self.bias = rarity, weights, bias
        # A callable says by itself which model it is; a module is known by its weights.
        self.fingerprint = hashlib.sha256(rarity.tobytes() + weights.tobytes() + bias.tobytes()).hexdigest()[:32]

    def __call__(self, letters: torch.Tensor) -> torch.Tensor:
        """Scores of shape (texts, classes)."""
        return torch.tensor(weighed(features(letters), self.rarity) @ self.weights.T + self.bias, dtype=torch.float32)


def weighed(counts: sparse.csr_matrix, rarity: numpy.ndarray) -> sparse.csr_matrix:
    """Counts times rarity, each row of length 1."""
    product = counts.multiply(rarity).tocsr()
    length = numpy.sqrt(product.multiply(product).sum(axis=1)).A1
    return sparse.diags(1 / numpy.maximum(length, 1e-12)) @ product


def train_text_teacher(folder: Path = FOLDER) -> TextTeacher:
    """The teacher; it is trained by the first call, in tens of seconds, and read from its file by later ones."""
    path = folder / "text_teacher.npz"
    if not path.exists():
        training, _ = texts(folder)
        counts = features(training.letters)
        rarity = 1 + numpy.log((1 + counts.shape[0]) / (1 + numpy.bincount(counts.indices, minlength=counts.shape[1])))
        model = LogisticRegression(C=10, max_iter=60, tol=1e-3).fit(weighed(counts, rarity), training.targets.numpy())
        unfinished = folder / f"text_teacher.{random.SystemRandom().randrange(1 << 32)}.npz"
        numpy.savez(unfinished, rarity=rarity, weights=model.coef_, bias=model.intercept_)
        unfinished.replace(path)
    with numpy.load(path) as arrays:
        return TextTeacher(arrays["rarity"], arrays["weights"], arrays["bias"])


def make_text_student() -> torch.nn.Module:
    """The mean of its words' 32 numbers, and a linear layer: a bag of words."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.EmbeddingBag(BUCKETS + 1, WIDTH, mode="mean", padding_idx=0), torch.nn.Linear(WIDTH, CLASSES)
    )


@torch.no_grad()
def text_accuracy(model: torch.nn.Module, test: Texts) -> float:
    """The share of texts whose package the model names."""
    return float((model(test.words).argmax(1) == test.targets).float().mean())
