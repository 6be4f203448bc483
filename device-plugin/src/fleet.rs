//! The GPUs of the node and whether they are served, polled from the control daemon.

use mpsshim_control::settings::Settings;
use mpsshim_control::ui::Ui;
use serde::Deserialize;
use std::io;
use std::thread;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

/// The daemon's own devices are the rows without a server.
const DEVICES: &str = "device_query --format=json";
/// A cheap command for liveness checks. Repeated on one connection, it is logged once.
const ALIVE: &str = "get_server_list";
/// A daemon that has not answered within this time counts as unavailable. One that has just started may take longer to
/// find its devices; the plugin waits for that.
const PATIENCE: Duration = Duration::from_secs(5);

/// A GPU, or a MIG instance.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Gpu {
    /// `GPU-…` or `MIG-…`.
    pub uuid: String,
    /// Bytes.
    pub memory: u64,
    #[serde(rename = "server")]
    of: Option<i32>,
    /// Whether the daemon serves it now.
    #[serde(skip)]
    pub served: bool,
}

/// All GPUs that the daemon has ever listed, since containers may have parts of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fleet {
    /// By ordinal, as they were found.
    pub gpus: Vec<Gpu>,
}

impl Fleet {
    /// Updates the GPUs from the daemon's answer, or marks all as not served if there was none.
    fn learn(&mut self, told: &Result<Vec<Gpu>, String>) {
        self.gpus.iter_mut().for_each(|gpu| gpu.served = false);
        for gpu in told.iter().flatten() {
            let found = self.gpus.iter_mut().find(|known| known.uuid == gpu.uuid);
            match found {
                Some(known) => *known = gpu.clone(),
                None => self.gpus.push(gpu.clone()),
            }
        }
    }
}

/// A connection to the daemon and its devices, which do not change.
struct Known {
    daemon: Ui,
    gpus: Vec<Gpu>,
}

impl Known {
    fn connect(settings: &Settings) -> Result<Known, String> {
        let mut daemon = Ui::connect(settings).map_err(|error| error.to_string())?;
        let answer = daemon.command(DEVICES).map_err(|error| error.to_string())?;
        match answer.ok {
            true => parse(&answer.text).map(|gpus| Known { daemon, gpus }),
            false => Err(answer.text.trim_end().to_owned()),
        }
    }

    fn is_alive(&mut self) -> bool {
        self.daemon.command(ALIVE).is_ok()
    }
}

/// Queries the daemon, which may have been restarted in between.
fn ask(known: &mut Option<Known>, settings: &Settings) -> Result<Vec<Gpu>, String> {
    if !known.as_mut().is_some_and(Known::is_alive) {
        *known = None;
        *known = Some(Known::connect(settings)?);
    }
    Ok(known.iter().flat_map(|known| known.gpus.clone()).collect())
}

fn parse(text: &str) -> Result<Vec<Gpu>, String> {
    let rows: Vec<Gpu> = serde_json::from_str(text)
        .map_err(|error| format!("its list of devices is not understood: {error}"))?;
    let own = rows.into_iter().filter(|gpu| gpu.of.is_none());
    Ok(own
        .map(|gpu| Gpu {
            served: true,
            ..gpu
        })
        .collect())
}

/// Keeps `fleet` up to date for as long as the process lives. The daemon is queried by a thread, because a daemon that
/// hangs would block its caller.
///
/// # Errors
/// The thread cannot be created.
pub fn follow(
    settings: Settings,
    interval: Duration,
    fleet: watch::Sender<Fleet>,
) -> io::Result<()> {
    let (answers, mut heard) = mpsc::channel(1);
    let path = settings.pipe_directory.display().to_string();
    thread::Builder::new()
        .name("daemon".into())
        .spawn(move || {
            let mut known = None;
            while answers.blocking_send(ask(&mut known, &settings)).is_ok() {
                thread::sleep(interval);
            }
        })?;
    tokio::spawn(async move {
        let mut trouble = None;
        loop {
            let told = match timeout(interval + PATIENCE, heard.recv()).await {
                Ok(Some(told)) => told,
                Ok(None) => return,
                Err(_) => Err("it does not answer".to_owned()),
            };
            let why = told.as_ref().err().cloned();
            if why != trouble {
                match &why {
                    Some(why) => tracing::warn!("the control daemon in {path}: {why}"),
                    None => tracing::info!("the control daemon in {path} answers again"),
                }
                trouble = why;
            }
            fleet.send_if_modified(|fleet| {
                let before = fleet.clone();
                fleet.learn(&told);
                *fleet != before
            });
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = r#"[
        {"server": null, "device": 0, "pci": "0", "uuid": "GPU-a", "name": "A", "memory": 1048576},
        {"server": null, "device": 1, "pci": "1", "uuid": "GPU-b", "name": "B", "memory": 2097152},
        {"server": 1110, "device": 0, "pci": "0", "uuid": "GPU-c", "name": "C", "memory": 1}
    ]"#;

    fn served(fleet: &Fleet) -> Vec<(&str, bool)> {
        let gpus = fleet.gpus.iter();
        gpus.map(|gpu| (gpu.uuid.as_str(), gpu.served)).collect()
    }

    #[test]
    fn what_was_known_stays_known() {
        let mut fleet = Fleet::default();
        let down = Err("gone".to_owned());
        fleet.learn(&down);
        assert!(fleet.gpus.is_empty());
        fleet.learn(&parse(TWO));
        assert_eq!(served(&fleet), [("GPU-a", true), ("GPU-b", true)]);
        assert_eq!(fleet.gpus[1].memory, 2 << 20);
        fleet.learn(&down);
        assert_eq!(served(&fleet), [("GPU-a", false), ("GPU-b", false)]);
        // One GPU is gone, another has more memory.
        let one = TWO.replace("GPU-a", "GPU-d").replace("2097152", "3145728");
        fleet.learn(&parse(&one));
        assert_eq!(
            served(&fleet),
            [("GPU-a", false), ("GPU-b", true), ("GPU-d", true)]
        );
        assert_eq!(fleet.gpus[1].memory, 3 << 20);
    }

    #[test]
    fn an_answer_that_is_none_is_a_trouble() {
        for text in ["", "{}", r#"[{"uuid": "GPU-a"}]"#] {
            let why = parse(text).expect_err(text);
            assert!(why.contains("not understood"), "{why}");
        }
    }
}
