//! Green contexts of clients, and the multiprocessors they are made of.
//!
//! The driver's structure of a resource holds addresses of its own and a check sum. It never leaves the server: a
//! client gets a place in its session's list. Equal resources share one, so that the list is as long as there are
//! different ones; CUDA has no call that would take one off.

use super::Shared;
use mpsshim_proto::cuda::*;
use mpsshim_proto::message::context::Resource;
use std::sync::Arc;

/// Resources, and ways to put them together, that a session may have.
const MAX_RESOURCES: usize = 4096;

/// A green context. Its streams hold it, so that it ends after them.
#[derive(Debug)]
pub struct Green {
    /// The driver's.
    pub raw: CUgreenCtx,
    /// Server's ordinal.
    pub device: usize,
}

/// Kept by session and streams.
pub type GreenRef = Arc<Green>;

/// What a session was told of multiprocessors.
#[derive(Debug, Default)]
pub struct Resources {
    list: Vec<(CUdevResource, usize)>,
    descriptions: Vec<(Vec<u32>, CUdevResourceDesc, usize)>,
}

impl Resources {
    /// What a client gets to know of a resource of a device.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` when there are too many.
    pub fn tell(&mut self, resource: CUdevResource, device: usize) -> Result<Resource, CUresult> {
        let known = self
            .list
            .iter()
            .position(|known| *known == (resource, device));
        let token = match known {
            Some(token) => token,
            None if self.list.len() < MAX_RESOURCES => {
                self.list.push((resource, device));
                self.list.len() - 1
            }
            None => return Err(CUDA_ERROR_OUT_OF_MEMORY),
        };
        let [count, least, alignment] = resource.sm;
        Ok(Resource {
            token: token as u32,
            count,
            least,
            alignment,
        })
    }

    /// The driver's structure and its device.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_RESOURCE_TYPE` for one that was never told.
    pub fn get(&self, token: u32) -> Result<(CUdevResource, usize), CUresult> {
        self.list
            .get(token as usize)
            .copied()
            .ok_or(CUDA_ERROR_INVALID_RESOURCE_TYPE)
    }

    /// Puts resources together, as the driver sees fit; the same way gives the same again.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_OUT_OF_MEMORY` when there are too many ways.
    pub fn describe(
        &mut self,
        shared: &Shared,
        tokens: Vec<u32>,
        device: usize,
    ) -> Result<usize, CUresult> {
        let mut resources = Vec::new();
        for token in &tokens {
            resources.push(self.get(*token)?.0);
        }
        let known = |(of, ..): &(Vec<u32>, CUdevResourceDesc, usize)| *of == tokens;
        if let Some(at) = self.descriptions.iter().position(known) {
            return Ok(at);
        }
        if self.descriptions.len() >= MAX_RESOURCES {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let mut description = CUdevResourceDesc::NULL;
        let count = resources.len() as u32;
        let driver = &shared.driver.context;
        driver.generate_desc(&mut description, resources.as_mut_ptr(), count)?;
        self.descriptions.push((tokens, description, device));
        Ok(self.descriptions.len() - 1)
    }

    /// A description for a device.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for one that was never made, or for another device.
    pub fn description(&self, at: usize, device: usize) -> Result<CUdevResourceDesc, CUresult> {
        match self.descriptions.get(at) {
            Some((_, description, of)) if *of == device => Ok(*description),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
}

/// Ends a green context that nobody holds any more; gives it back while a stream does.
pub fn end(shared: &Shared, green: GreenRef) -> Option<GreenRef> {
    match Arc::try_unwrap(green) {
        Ok(green) => {
            let _ = shared.devices[green.device].make_current(&shared.driver);
            if let Err(status) = shared.driver.context.green_destroy(green.raw) {
                tracing::warn!(%status, "a green context does not end");
            }
            None
        }
        Err(green) => Some(green),
    }
}
