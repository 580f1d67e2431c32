# The python of the module: makes environments without setuptools, with the module in place of them.
[[ "$*" = "-m venv --system-site-packages "* ]] || exec "$BASE" "$@"
"$BASE" -m venv "$4" && ln -s "$TOP/bin/hf" "$4/bin" && cd "$4"/lib/python*/site-packages || exit
rm -rf setuptools* && echo "$TOP/module" >module.pth
