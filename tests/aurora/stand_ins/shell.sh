# What frameworks/2025.3.1 sets, and where its libraries are; a login shell has the function.
module() {
    [ "$2" = frameworks ] || return 0
    export ONEAPI_DEVICE_SELECTOR="opencl:gpu;level_zero:gpu" CCL_OP_SYNC=1 ZE_FLAT_DEVICE_HIERARCHY=FLAT
    export CMPLR_ROOT="$PREFIX" LD_LIBRARY_PATH="$PREFIX"/lib
}
