//! Managed variables: one address for the program and its kernels.

use mpsshim_tests::programs::{client, finish, well};
use mpsshim_tests::scene::daemon;

/// As on the genuine driver (580.159.04).
const NATIVELY: &str = "bytes 4 4000 24 4
first 5 0 0
launched 8 15 -1
written 103 110 -2
same true managed 1
copied 7 7
counter CUDA_SUCCESS (0)
plain CUDA_ERROR_NOT_FOUND (500)
CUDA_SUCCESS (0) 5
kept 5
";

#[test]
fn managed_variables_are_at_one_address_for_the_program_and_its_kernels() {
    let place = daemon();
    let done = finish(&mut client(&place, &["managed"]));
    assert_eq!((well(&done).as_str(), done.err.as_str()), (NATIVELY, ""));
    // The image of another program has its own.
    let again = finish(&mut client(&place, &["managed"]));
    assert_eq!(well(&again), NATIVELY);
}
