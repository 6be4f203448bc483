//! Many more threads of one client than there are processors: they get on, and so does a neighbour.

use crate::alone;
use mpsshim_tests::PATIENCE;
use mpsshim_tests::programs::{Running, client, well};
use mpsshim_tests::scene::Scene;

/// More than have records in the segment.
const THREADS: &str = "256";

#[test]
fn a_neighbour_of_256_threads_goes_on() {
    let _alone = alone();
    let mut scene = Scene::new();
    let crowd = Running::start_until(&mut client(&scene.place, &["crowd", THREADS]), "busy");
    // Each round copies, launches, allocates and waits.
    let neighbour = Running::start(&mut client(&scene.place, &["work", "50"]));
    let done = neighbour.finish(PATIENCE);
    assert_eq!(well(&done), "busy\n");
    // Each thread has made four rounds.
    well(&crowd.finish(PATIENCE));
    scene.is_as_before();
}
