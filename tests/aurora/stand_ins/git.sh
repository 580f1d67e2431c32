# Makes a clone, whose job is edited as a user does, to take seconds.
mkdir "$3" && cd "$3" || exit
tar c -C "$TREE" cocodiff configs eval sycl_kernels launch pyproject.toml README.md LICENSE | tar x
sed -i 's|^STEPS=.*|STEPS=2|; s|^INPUT=.*|INPUT=cocodiff/demo_model/samples/synthetic_tooth.tif|' launch/aurora.pbs
