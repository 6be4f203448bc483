//! Green contexts of clients, and the multiprocessors they are made of.
//!
//! The driver's structure of a resource holds addresses of its own and a check sum. It never leaves the server: a
//! client gets a place in its session's list. Equal resources share one, so that the list is as long as there are
//! different ones; CUDA has no call that would take one off.

use crate::engine::base::bounds;
use crate::engine::base::driver::Driver;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::gpu::kept_streams::KeptStreams;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::context::Resource;
use std::sync::Arc;

/// Streams made ahead in a lasting green context: creating one can block while other clients' kernels run.
const STREAMS_AHEAD: usize = 8;

/// A green context. Its streams hold it, so that it ends after them.
#[derive(Debug)]
pub struct Green {
    /// The driver's.
    pub raw: CUgreenCtx,
    /// Server's ordinal.
    pub device: Ordinal,
    /// The server's own, for clients with a percentage: it and its streams are there for as long as the server.
    lasting: Option<Lasting>,
}

#[derive(Debug)]
struct Lasting {
    /// What a thread makes current for calls that take the current context's multiprocessors.
    context: CUcontext,
    streams: KeptStreams,
}

impl Green {
    /// One that a client has made.
    pub fn of_client(raw: CUgreenCtx, device: Ordinal) -> Green {
        Green {
            raw,
            device,
            lasting: None,
        }
    }

    /// One of the server's own, with some streams; its device's context is current.
    ///
    /// # Errors
    /// The driver's.
    pub fn lasting(driver: &Driver, raw: CUgreenCtx, device: Ordinal) -> Result<Green, CUresult> {
        let mut context = CUcontext::NULL;
        driver.context.ctx_from_green(&mut context, raw)?;
        let green = Green {
            raw,
            device,
            lasting: Some(Lasting {
                context,
                streams: KeptStreams::default(),
            }),
        };
        for _ in 0..STREAMS_AHEAD {
            let stream = green.create_stream(driver, 0)?;
            green.end_stream(driver, 0, stream);
        }
        Ok(green)
    }

    /// What a thread makes current to work within it; `None` for a client's.
    pub fn context(&self) -> Option<CUcontext> {
        self.lasting.as_ref().map(|lasting| lasting.context)
    }

    /// A non-blocking stream, a kept one if there is one; the device's context is current.
    ///
    /// # Errors
    /// The driver's.
    pub fn take_stream(&self, driver: &Driver, priority: i32) -> Result<CUstream, CUresult> {
        let lasting = self.lasting.as_ref();
        match lasting.and_then(|lasting| lasting.streams.take(priority)) {
            Some(stream) => Ok(stream),
            None => self.create_stream(driver, priority),
        }
    }

    /// Whether one was kept.
    pub fn has_stream(&self, priority: i32) -> bool {
        let lasting = self.lasting.as_ref();
        lasting.is_some_and(|lasting| lasting.streams.has(priority))
    }

    fn create_stream(&self, driver: &Driver, priority: i32) -> Result<CUstream, CUresult> {
        let mut stream = CUstream::NULL;
        let functions = &driver.context;
        functions.green_stream_create(&mut stream, self.raw, CU_STREAM_NON_BLOCKING, priority)?;
        Ok(stream)
    }

    /// Whether its streams are kept.
    pub fn is_lasting(&self) -> bool {
        self.lasting.is_some()
    }

    /// Keeps a drained stream, or destroys a client's.
    pub fn end_stream(&self, driver: &Driver, priority: i32, stream: CUstream) {
        match &self.lasting {
            Some(lasting) => {
                if let Some(surplus) = lasting.streams.keep(priority, stream) {
                    let _ = driver.context.stream_destroy(surplus);
                }
            }
            None => {
                let _ = driver.context.stream_destroy(stream);
            }
        }
    }

    /// Streams that are kept in it.
    pub fn kept_streams(&self) -> usize {
        self.lasting
            .as_ref()
            .map_or(0, |lasting| lasting.streams.count())
    }
}

/// Kept by session and streams.
pub type GreenRef = Arc<Green>;

/// What a session was told of multiprocessors.
#[derive(Debug, Default)]
pub struct Resources {
    list: Vec<(CUdevResource, Ordinal)>,
    descriptions: Vec<(Vec<u32>, CUdevResourceDesc, Ordinal)>,
}

impl Resources {
    /// Whether the client was told of none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty() && self.descriptions.is_empty()
    }

    /// What a client gets to know of a resource of a device.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` when there are too many.
    pub fn tell(&mut self, resource: CUdevResource, device: Ordinal) -> Result<Resource, CUresult> {
        let known = self
            .list
            .iter()
            .position(|known| *known == (resource, device));
        let token = match known {
            Some(token) => token,
            None if self.list.len() < bounds::RESOURCES => {
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
    pub fn get(&self, token: u32) -> Result<(CUdevResource, Ordinal), CUresult> {
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
        driver: &Driver,
        tokens: Vec<u32>,
        device: Ordinal,
    ) -> Result<usize, CUresult> {
        let mut resources = Vec::new();
        for token in &tokens {
            resources.push(self.get(*token)?.0);
        }
        let known = |(of, ..): &(Vec<u32>, CUdevResourceDesc, Ordinal)| *of == tokens;
        if let Some(at) = self.descriptions.iter().position(known) {
            return Ok(at);
        }
        if self.descriptions.len() >= bounds::RESOURCES {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let description = description(driver, resources)?;
        self.descriptions.push((tokens, description, device));
        Ok(self.descriptions.len() - 1)
    }

    /// A description for a device.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for one that was never made, or for another device.
    pub fn description(&self, at: usize, device: Ordinal) -> Result<CUdevResourceDesc, CUresult> {
        match self.descriptions.get(at) {
            Some((_, description, of)) if *of == device => Ok(*description),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
}

/// What a green context of these resources is made from.
///
/// # Errors
/// The driver's.
pub fn description(
    driver: &Driver,
    mut resources: Vec<CUdevResource>,
) -> Result<CUdevResourceDesc, CUresult> {
    let mut description = CUdevResourceDesc::NULL;
    let count = resources.len() as u32;
    let first = resources.as_mut_ptr();
    driver
        .context
        .generate_desc(&mut description, first, count)?;
    Ok(description)
}
