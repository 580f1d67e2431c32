"""A job of the tests' own: squares of numbers, which a setting makes with an error of its own."""

import numpy as np
from cocodiff_eval.harness.items import Batch, Cost, ItemSamples
from cocodiff_eval.harness.job import ItemResult, Job
from cocodiff_eval.quality.fusing import Moments
from cocodiff_eval.quality.metrics import psnr_db

ERRORS = {"rough": 1e-1, "fine": 1e-3, "exact": 0.0}


class Squares(Job):
    unit = "squares"

    def __init__(self, leads):
        self.leads = leads
        self.batches = [Batch(0, (number,)) for number in range(8)]

    def make(self, settings, batch):
        made = {one: np.array([batch.indices[0] ** 2 + ERRORS[one]], np.float32) for one in settings}
        return {one: [ItemSamples(Moments.of(square), Cost())] * self.leads for one, square in made.items()}

    def judge(self, batch, place, drawn, exact):
        found = {name: round(float(one.moments.mean_YX[0]), 4) for name, one in drawn.items() if name != exact}
        return ItemResult([{"mode": name} for name in found], {name: np.array(value) for name, value in found.items()})

    def figure_db(self, bound, batch, place, exact, one):
        return psnr_db(float(np.square(one.moments.mean_YX - exact.moments.mean_YX)[0]))
