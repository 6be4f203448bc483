//! Images that the next server loads ahead of a restart, or of the end of the server.

use crate::restart::{Installed, restart, standbys};
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::{Object, Op};
use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::{Place, wait_until};
use mpsshim_tests::peer::{PTX, Peer, memory_file, new_ptx, variables_ptx};
use mpsshim_tests::scene::{control, daemon, daemon_with};
use mpsshim_tests::survivors::{Survivor, kill_server, server};
use std::os::fd::AsFd;
use std::time::Duration;

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

    /// Unloads its first image.
    fn unload(&mut self) {
        let (object, _) = self.images.remove(0);
        let unload = Object { object };
        self.peer
            .post(Op::ImageUnload, &unload, &[])
            .expect("unloaded");
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

/// The daemon keeps a standby for each server.
const STANDBY: (&str, &str) = ("MPSSHIM_STANDBY", "1");

/// Waits until the last standby, by number, has this many images.
fn wait_for_images(place: &Place, standby: usize, count: usize) {
    let end = format!("; {count} are loaded");
    wait_until(&format!("standby {standby} has {count} images"), || {
        let log = place.log("server.log");
        let mut parts = log.split("Standing by").skip(standby);
        let own = parts.next().unwrap_or_default();
        let mut lines = own.lines().rev();
        let last = lines.find(|line| line.ends_with(" are loaded"));
        last.is_some_and(|line| line.ends_with(&end))
    });
}

/// A daemon whose standbys have a driver with this setting.
fn daemon_with_bad_standbys(setting: &str) -> (Installed, Place) {
    let installed = Installed::new();
    installed.replace(&format!(
        "case \"$*\" in *--standby*) export {setting};; esac\nexec {} \"$@\"",
        artifact("mps-server").display()
    ));
    let place = installed.daemon(&[STANDBY]);
    (installed, place)
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

#[test]
fn a_standby_kept_ready_has_the_images_when_the_server_is_killed() {
    let place = daemon_with(&[STANDBY]);
    let mut owners = [(); 2].map(|()| Owner::connect(&place));
    let with_state = variables_ptx(4);
    for owner in &mut owners {
        owner.module(PTX, "fill");
        owner.module(&new_ptx(), "fill");
        owner.module(&with_state, "count");
        owner.image(Kind::Library, 0);
    }
    for kills in 1..=2 {
        wait_for_images(&place, kills, 7);
        kill_server(&place);
        owners.iter_mut().for_each(Owner::is_well);
        assert_eq!(numbers(&place, " used, 0 unloaded"), vec![7; kills]);
    }
    // Loaded later, unloaded, and those of a client that ends.
    wait_for_images(&place, 3, 7);
    let [mut stays, goes] = owners;
    stays.module(&new_ptx(), "fill");
    wait_for_images(&place, 3, 8);
    stays.unload();
    stays.unload();
    wait_for_images(&place, 3, 7);
    drop(goes);
    wait_for_images(&place, 3, 3);
    let next = restart(&place, &[]).expect("a restart");
    assert_eq!(next, standbys(&place)[2].as_raw());
    stays.is_well();
    assert_eq!(numbers(&place, " used, 0 unloaded"), [7, 7, 3]);
}

#[test]
fn images_that_go_at_once_leave_the_standby_empty() {
    let place = daemon_with(&[STANDBY]);
    let mut owner = Owner::connect(&place);
    owner.module(PTX, "fill");
    wait_for_images(&place, 1, 1);
    owner.unload();
    wait_for_images(&place, 1, 0);
    owner.image(Kind::Library, 0);
    wait_for_images(&place, 1, 1);
    kill_server(&place);
    owner.is_well();
    assert_eq!(numbers(&place, " used, 0 unloaded"), [1]);
}

#[test]
fn programs_go_on_with_the_images_of_their_standby() {
    let place = daemon_with(&[STANDBY]);
    let mut survivors: Vec<Survivor> = (0..4).map(|_| Survivor::start(&place)).collect();
    for round in 1..=3 {
        survivors.iter_mut().for_each(Survivor::round);
        // One that all have, and another of each.
        wait_for_images(&place, round, 5);
        kill_server(&place);
        survivors.iter_mut().for_each(Survivor::round);
        assert_eq!(numbers(&place, " used, 0 unloaded"), vec![5; round]);
    }
    survivors.into_iter().for_each(Survivor::end);
}

#[test]
fn a_standby_that_ends_while_it_loads_is_replaced_by_one_without_images() {
    let text = "// the driver crashes here";
    let (_installed, place) = daemon_with_bad_standbys(&format!("SOFTGPU_ENDS_AT='{text}'"));
    let mut owner = Owner::connect(&place);
    owner.module(&format!("{PTX}{text}\n"), "fill");
    wait_until("the second standby is ready", || {
        place.log("control.log").matches(" stands by").count() == 2
    });
    owner.module(&new_ptx(), "fill");
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(standbys(&place).len(), 2, "{}", place.log("control.log"));
    assert!(numbers(&place, " images ahead, of").is_empty());
}

#[test]
fn a_standby_that_hangs_as_it_loads_is_ended_when_the_clients_come() {
    let text = "// the driver hangs here";
    let (installed, place) = daemon_with_bad_standbys(&format!("SOFTGPU_HANGS_AT='{text}'"));
    let mut owner = Owner::connect(&place);
    owner.module(&new_ptx(), "fill");
    wait_for_images(&place, 1, 1);
    owner.module(&format!("{PTX}{text}\n"), "fill");
    // It is told to load the other image, and reports no end of that.
    std::thread::sleep(Duration::from_secs(2));
    let hangs = standbys(&place)[0].as_raw();
    kill_server(&place);
    owner.is_well();
    let next = server(&place).expect("a server");
    assert_ne!(next, hangs, "{}", place.log("control.log"));
    wait_until("the next standby is ready", || {
        place.log("control.log").matches(" stands by").count() == 2
    });
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(numbers(&place, " images ahead, of").len(), 1);
    drop(installed);
}

#[test]
fn a_client_gets_the_memory_of_the_images_of_a_standby() {
    let place = daemon_with(&[STANDBY, ("SOFTGPU_MEMORY", "256M")]);
    let mut owner = Owner::connect(&place);
    owner.module(PTX, "fill");
    wait_for_images(&place, 1, 1);
    // The software's devices have memory of their own in each process, so that nothing is gained.
    let range = owner.peer.memory(240 << 20).expect("memory");
    assert!(owner.peer.memory(240 << 20).is_err());
    wait_until("the standby has unloaded its images", || {
        let log = place.log("server.log");
        log.contains("Unloaded 1 images that were loaded ahead: a client needs the memory")
    });
    assert!(range.start != 0);
    kill_server(&place);
    owner.is_well();
}
