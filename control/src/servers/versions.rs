//! Servers of several releases: a client gets a server that speaks its library's wire.

use super::{Server, Servers};
use crate::releases::Executable;
use mpsshim_api::cuda::CUDA_ERROR_MPS_CONNECTION_FAILED;
use mpsshim_proto::handshake::Wire;
use std::sync::Arc;

impl Servers {
    /// The executable of a server for clients with this wire, the installed one if there are none yet.
    ///
    /// # Errors
    /// There is none, in words.
    pub(super) fn executable_for(&mut self, wire: Option<Wire>) -> Result<Arc<Executable>, String> {
        let installed = self.releases.installed();
        let Some(wire) = wire else {
            return installed.fits().map(|()| installed);
        };
        if let Some(found) = self.releases.speaking(wire) {
            return Ok(found);
        }
        if installed.spoken().speaks(wire) {
            return installed.fits().map(|()| installed);
        }
        Err(format!(
            "its libmpsshim.so is of another release ({wire}), and no server of that release is installed; the installed \
             server {} is of release {}",
            installed.path().display(),
            installed.spoken().version
        ))
    }

    /// Refuses the clients that wait with a wire that no server speaks, or requests for a server if there is none.
    pub(super) fn refuse_unspoken(&mut self, wire: Option<Wire>, why: &str) {
        if wire.is_none() {
            tracing::error!("No server is started: {why}");
            self.wanted.clear();
        }
        let status = CUDA_ERROR_MPS_CONNECTION_FAILED;
        self.refuse_clients(|waiting| Some(waiting.wire()) == wire, status, why);
    }

    /// Whether it is not the installed server, and the installed one, which speaks other wires, serves the same users.
    pub(super) fn is_beside_newer(&self, server: &Server) -> bool {
        let is_installed = |server: &Server| {
            let executable = server.executable.as_ref();
            executable.is_some_and(|one| self.releases.is_installed(one))
        };
        let program = server.quarantined.as_ref();
        let newer = |other: &Server| {
            is_installed(other)
                && other.serves(server.owner(), program, None)
                && other.release.wires != server.release.wires
        };
        server.standby_of.is_none() && !is_installed(server) && self.running.iter().any(newer)
    }
}
