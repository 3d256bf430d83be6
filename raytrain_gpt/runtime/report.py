"""stub"""
from pathlib import Path
REPORT_FILE="report.html"
def write_report(run_dir: Path) -> Path:
    return run_dir
def write_comparison(run_dirs: list[Path], out: Path) -> Path:
    return out
