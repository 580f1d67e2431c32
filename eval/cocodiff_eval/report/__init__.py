"""`report.html`: one self-contained page with every slice's pictures, the numbers and what they mean."""

from cocodiff_eval.report.page import write_report
from cocodiff_eval.report.pictures import (
    Generated,
    Picture,
    PicturePlan,
    encode,
    error_image,
    plan_pictures,
    shown_slices,
    worst_slices,
)
from cocodiff_eval.report.volume import ShownVolume

__all__ = [
    "Generated",
    "Picture",
    "PicturePlan",
    "ShownVolume",
    "encode",
    "error_image",
    "plan_pictures",
    "shown_slices",
    "worst_slices",
    "write_report",
]
