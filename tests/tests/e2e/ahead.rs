//! Images that the next server loads ahead of a restart.

use crate::restart::{Installed, restart, standbys};
use mpsshim_proto::handle::Kind;
use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::Place;
use mpsshim_tests::peer::{PTX, Peer, memory_file, new_ptx, variables_ptx};
use mpsshim_tests::scene::{control, daemon};
use mpsshim_tests::survivors::Survivor;
use std::os::fd::AsFd;

/// A client with images, by handle, and one function of each.
struct Owner {
    peer: Peer,
    images: Vec<(u64, &'static str)>,
}

impl Owner {
    fn connect(place: &Place) -> Owner {
        let mut peer = Peer::connect(&control(place)).expect("a session");
        peer.attach().expect("a context");
        Owner {
            peer,
            images: Vec::new(),
        }
    }

    fn module(&mut self, text: &str, function: &'static str) {
        let module = self.peer.module(text.as_bytes()).expect("a module");
        self.peer.function(module, function).expect("a function");
        self.images.push((module, function));
    }

    /// A library, or a module with a log.
    fn image(&mut self, kind: Kind, error_log: u32) {
        let text = new_ptx();
        let mut body = self.peer.image_load(text.as_bytes());
        body.image = self.peer.handle(kind);
        body.error_log = error_log;
        let file = memory_file(text.as_bytes()).expect("a file");
        let loaded = self.peer.load(&body, &[], file.as_fd());
        let image = loaded.expect("an image");
        self.peer.function(image, "fill").expect("a function");
        self.images.push((image, "fill"));
    }

    /// Its images are there.
    fn is_well(&mut self) {
        for (image, function) in &self.images {
            self.peer.function(*image, function).expect("a function");
        }
    }
}

/// The numbers before these words in the lines of server.log that contain them.
fn numbers(place: &Place, words: &str) -> Vec<usize> {
    let log = place.log("server.log");
    let before = log
        .lines()
        .filter_map(|line| Some(line.split_once(words)?.0));
    let last = |text: &str| text.rsplit(' ').next()?.parse().ok();
    before.map(|text| last(text).expect("a number")).collect()
}

#[test]
fn images_are_loaded_before_the_clients_come_and_used() {
    let place = daemon();
    let mut owners = [(); 2].map(|()| Owner::connect(&place));
    let with_state = variables_ptx(4);
    for owner in &mut owners {
        owner.module(PTX, "fill");
        owner.module(&new_ptx(), "fill");
        // Its kernels keep state: each client has an instance of its own.
        owner.module(&with_state, "count");
        owner.image(Kind::Library, 0);
    }
    for round in 1..=3 {
        restart(&place, &[]).expect("a restart");
        owners.iter_mut().for_each(Owner::is_well);
        assert_eq!(numbers(&place, " images ahead, of"), vec![7; round]);
        assert_eq!(numbers(&place, " different ones in use"), vec![6; round]);
        assert_eq!(numbers(&place, " used, 0 unloaded"), vec![7; round]);
    }
    let [mut stays, goes] = owners;
    drop(goes);
    stays.module(&new_ptx(), "fill");
    stays.is_well();
}

#[test]
fn images_with_logs_are_loaded_with_their_session() {
    let place = daemon();
    let mut owner = Owner::connect(&place);
    owner.image(Kind::Module, 100);
    restart(&place, &[]).expect("a restart");
    owner.is_well();
    assert_eq!(numbers(&place, " images ahead, of"), [0]);
    assert!(numbers(&place, " unloaded").is_empty());
}

#[test]
fn many_programs_find_all_their_images() {
    let place = daemon();
    let mut survivors: Vec<Survivor> = (0..6).map(|_| Survivor::start(&place)).collect();
    for round in 1..=3 {
        survivors.iter_mut().for_each(Survivor::round);
        restart(&place, &[]).expect("a restart");
        survivors.iter_mut().for_each(Survivor::round);
        let used = numbers(&place, " used, 0 unloaded");
        assert_eq!(used, numbers(&place, " images ahead, of"));
        // One that all have, and another of each.
        assert_eq!(used, vec![7; round]);
    }
    survivors.into_iter().for_each(Survivor::end);
}

#[test]
fn a_standby_that_ends_while_it_loads_is_replaced_by_another() {
    let installed = Installed::new();
    let place = installed.daemon(&[]);
    let mut owner = Owner::connect(&place);
    owner.module(&format!("{PTX}// the driver crashes here\n"), "fill");
    let once = installed.path.with_extension("once");
    installed.replace(&format!(
        "if mkdir {}; then export SOFTGPU_ENDS_AT='// the driver crashes here'; fi\nexec {} \"$@\"",
        once.display(),
        artifact("mps-server").display()
    ));
    let next = restart(&place, &[]).expect("a restart");
    let standbys = standbys(&place);
    assert_eq!(standbys.len(), 2, "{}", place.log("server.log"));
    assert_eq!(standbys[1].as_raw(), next);
    owner.is_well();
    assert!(numbers(&place, " images ahead, of").is_empty());
}
