//! The real daemon and server, with an eye on what the server holds and a second client that computes.

use crate::PATIENCE;
use crate::artifacts::{artifact, driver, write_program};
use crate::control_daemon::{Place, wait_until};
use crate::peer::{Peer, Worker};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A daemon whose servers run on softgpu, and its first server.
pub struct Scene {
    pub place: Place,
    pub observer: Peer,
    pub before: Held,
}

/// What a server process holds.
#[derive(Debug, PartialEq, Eq)]
pub struct Held {
    pub free: u64,
    pub descriptors: usize,
    pub mappings: usize,
}

impl Scene {
    pub fn new() -> Scene {
        Scene::with(&[])
    }

    /// One whose daemon has this in its environment.
    pub fn with(env: &[(&str, &str)]) -> Scene {
        let place = daemon_with(env);
        // Whatever is made once and kept exists after the first client.
        let mut first = Worker::connect(&control(&place)).expect("the first client");
        first.round().expect("the first round");
        let ended = Worker::connect(&control(&place)).expect("a second client at a time");
        drop((first, ended));
        let mut observer = Peer::connect(&control(&place)).expect("observer");
        observer.attach().expect("attach");
        wait_until("both have gone", || {
            place.log("server.log").contains("contexts is 1.")
        });
        let mut scene = Scene {
            place,
            observer,
            before: Held {
                free: 0,
                descriptors: 0,
                mappings: 0,
            },
        };
        scene.before = scene.settled();
        scene
    }

    pub fn server(&self) -> u32 {
        self.observer.welcome.server_pid
    }

    pub fn held(&mut self) -> Held {
        let pid = self.server();
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps");
        Held {
            free: self.observer.mem_info().expect("memory").free,
            descriptors: fs::read_dir(format!("/proc/{pid}/fd"))
                .expect("descriptors")
                .count(),
            // Images stay for those who load them next.
            mappings: maps
                .lines()
                .filter(|line| line.contains("memfd:") && !line.contains("memfd:mpsshim-image"))
                .count(),
        }
    }

    /// What is held once that has not changed for a while.
    pub fn settled(&mut self) -> Held {
        let mut held = self.held();
        let mut since = Instant::now();
        while since.elapsed() < Duration::from_millis(200) {
            std::thread::sleep(Duration::from_millis(20));
            let now = self.held();
            if now != held {
                (held, since) = (now, Instant::now());
            }
        }
        held
    }

    pub fn peer(&self) -> Peer {
        Peer::connect(&control(&self.place)).expect("peer")
    }

    pub fn worker(&self) -> Worker {
        Worker::connect(&control(&self.place)).expect("worker")
    }

    /// Runs `test` while a second client computes, then looks whether anything is left of it.
    pub fn beside_a_worker(mut self, test: impl FnOnce(&Scene)) {
        let bystander = Bystander::start(self.worker());
        test(&self);
        bystander.stop();
        self.is_as_before();
    }

    /// Whether nothing is left of any client but the observer.
    pub fn is_as_before(&mut self) {
        let until = Instant::now() + PATIENCE;
        loop {
            let now = self.held();
            if now == self.before {
                return;
            }
            let left = format!("left over: {now:?}, before: {:?}", self.before);
            assert!(Instant::now() < until, "{left}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

pub fn daemon() -> Place {
    daemon_with(&[])
}

/// A daemon whose servers are real and run on [`driver`].
pub fn daemon_with(env: &[(&str, &str)]) -> Place {
    daemon_with_options(&["-d"], env)
}

/// The same, started with these options.
pub fn daemon_with_options(options: &[&str], env: &[(&str, &str)]) -> Place {
    let text = |path: PathBuf| path.into_os_string().into_string().expect("UTF-8");
    let (server, driver) = (text(artifact("mps-server")), text(driver()));
    let mut all = vec![
        ("MPSSHIM_SERVER", server.as_str()),
        ("MPSSHIM_CUDA_LIBRARY", driver.as_str()),
        // However long a test takes.
        ("MPSSHIM_MOVE_LATER", "0"),
    ];
    all.extend(env);
    Place::with_daemon_options(options, &all)
}

/// A script in `folder` that starts the server with further options, for `MPSSHIM_SERVER`.
pub fn server_with(folder: &Path, options: &str) -> String {
    let script = folder.join("server");
    let server = artifact("mps-server");
    let text = format!("#!/bin/sh\nexec '{}' \"$@\" {options}\n", server.display());
    write_program(&script, &text);
    script.into_os_string().into_string().expect("UTF-8")
}

/// A daemon whose servers and keepers may have this many descriptors each; `folder` is for their script.
pub fn daemon_with_descriptors(folder: &Path, most: u32) -> Place {
    let script = folder.join("server");
    let (server, driver) = (artifact("mps-server"), driver());
    let text = format!(
        "#!/bin/sh\nulimit -n {most}\nexec '{}' \"$@\"\n",
        server.display()
    );
    write_program(&script, &text);
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let (script, driver) = (text(&script), text(&driver));
    let env = [
        ("MPSSHIM_SERVER", script.as_str()),
        ("MPSSHIM_CUDA_LIBRARY", driver.as_str()),
    ];
    Place::with_daemon_options(&["-d"], &env)
}

pub fn control(place: &Place) -> PathBuf {
    place.pipe().join("control")
}

/// A new client once a server has been lost: one that was handed to it at the last moment is refused, or dropped
/// without a welcome, and may try again.
pub fn reconnect(place: &Place) -> Worker {
    let until = Instant::now() + PATIENCE;
    loop {
        match Worker::connect(&control(place)) {
            Ok(worker) => return worker,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A client that computes in a thread of its own until it is stopped.
pub struct Bystander {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU32>,
    thread: JoinHandle<Duration>,
}

impl Bystander {
    pub fn start(mut worker: Worker) -> Bystander {
        let (stop, rounds) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU32::new(0)),
        );
        let (told, count) = (stop.clone(), rounds.clone());
        let thread = std::thread::spawn(move || {
            let mut longest = Duration::ZERO;
            while !told.load(Ordering::Relaxed) {
                let began = Instant::now();
                worker.round().expect("a bystander is not disturbed");
                longest = longest.max(began.elapsed());
                count.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(1));
            }
            longest
        });
        Bystander {
            stop,
            rounds,
            thread,
        }
    }

    /// Waits until it has done some more rounds: what goes on at the moment does not keep it waiting. How long a round takes
    /// is the machine's affair.
    pub fn goes_on(&self) {
        let before = self.rounds.load(Ordering::Relaxed);
        wait_until("the bystander goes on", || {
            let ended = self.thread.is_finished();
            ended || self.rounds.load(Ordering::Relaxed) >= before + 3
        });
    }

    /// One more round, then the end; how long its longest round took.
    pub fn stop(self) -> Duration {
        let before = self.rounds.load(Ordering::Relaxed);
        wait_until("the bystander has done one more round", || {
            self.rounds.load(Ordering::Relaxed) > before || self.thread.is_finished()
        });
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("bystander")
    }
}
