"""The job of a sweep: its points (`points`), its runs (`runs`) and the lines that they leave (`lines`)."""
