"""The report `report.html`: one self-contained page with every slice's pictures, the numbers and what they mean."""
