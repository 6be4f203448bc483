//! A standby: a server that has created its context and waits for the sessions of another server, to shorten their
//! pause.

use crate::engine;
use crate::keeper::Keeper;
use mpsshim_control::link::{Link, LinkError, Order, ToDaemon};
use mpsshim_model::limits::Limits;

/// Waits for sessions; `None`: the standby is not needed any more. Updates `limits` to those in force by then.
///
/// # Errors
/// The link has failed, or the connection to the keeper takes no limit of time.
pub fn wait(link: &Link, limits: &mut Limits) -> anyhow::Result<Option<Keeper>> {
    tracing::info!("Standing by");
    link.report(&ToDaemon::Standby {
        fingerprint: engine::fingerprint(),
    })?;
    loop {
        match link.next_order() {
            Ok(None | Some(Order::Shutdown { .. })) => {
                tracing::info!("Exiting");
                return Ok(None);
            }
            Ok(Some(Order::Adopt(keeper))) => {
                link.report(&ToDaemon::Adopts)?;
                return Ok(Some(Keeper::on(keeper)?));
            }
            Ok(Some(Order::Limits(new))) => *limits = new,
            Ok(Some(Order::Log(log))) => nix::unistd::dup2_stderr(log)?,
            // Other orders concern clients.
            Ok(Some(_)) => {}
            Err(LinkError::Io(error)) => return Err(error.into()),
            Err(error) => tracing::error!("{error}"),
        }
    }
}
