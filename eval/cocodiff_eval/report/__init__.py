"""`report.html`: one self-contained page with every slice's pictures, the numbers and what they mean."""

from cocodiff_eval.report.budget import PicturePlan, plan_pictures, worst_slices
from cocodiff_eval.report.encode import encode
from cocodiff_eval.report.page import write_report
from cocodiff_eval.report.pictures import Generated, Picture, error_image, shown_slices
from cocodiff_eval.report.templates import fill_template
from cocodiff_eval.report.volume import ShownVolume

__all__ = [
    "Generated",
    "Picture",
    "PicturePlan",
    "ShownVolume",
    "encode",
    "error_image",
    "fill_template",
    "plan_pictures",
    "shown_slices",
    "worst_slices",
    "write_report",
]
