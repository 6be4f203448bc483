//! Green contexts of clients, and the multiprocessor resources they are made of.
//!
//! The driver's resource structure contains its own addresses and a checksum, so it never leaves the server: a client
//! gets an index into its session's list. Equal resources share an entry, which limits the list to the number of
//! distinct ones; CUDA has no call that would release one.

use crate::engine::base::bounds;
use crate::engine::base::driver::Driver;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::gpu::kept_streams::KeptStreams;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::context::Resource;
use std::collections::HashSet;
use std::sync::Arc;

/// Streams created ahead in a lasting green context: creating one can block while other clients' kernels run.
const STREAMS_AHEAD: usize = 8;

/// Destroyed green contexts that the next server makes again at most: one takes it 2 ms, and device memory that the driver
/// keeps.
const MOST_ENDED: usize = 64;

/// A green context. Its streams hold a reference, so that it is destroyed after them.
#[derive(Debug)]
pub struct Green {
    /// The driver's object.
    pub raw: CUgreenCtx,
    /// Server's ordinal.
    pub device: Ordinal,
    /// Present if it is one of the server's own, for clients with a percentage; it and its streams last as long as the
    /// server.
    lasting: Option<Lasting>,
}

#[derive(Debug)]
struct Lasting {
    /// Made current for calls that use the current context's multiprocessors.
    context: CUcontext,
    streams: KeptStreams,
}

impl Green {
    /// A green context created by a client.
    pub fn of_client(raw: CUgreenCtx, device: Ordinal) -> Green {
        Green {
            raw,
            device,
            lasting: None,
        }
    }

    /// One of the server's own green contexts, with some streams. The device's context must be current.
    ///
    /// # Errors
    /// Driver errors.
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
        green.keep_streams(driver, STREAMS_AHEAD)?;
        Ok(green)
    }

    /// Creates streams of the lowest priority until `count` are kept. The device's context must be current.
    ///
    /// # Errors
    /// Driver errors.
    pub fn keep_streams(&self, driver: &Driver, count: usize) -> Result<(), CUresult> {
        for _ in self.kept_streams()..count {
            let stream = self.create_stream(driver, 0)?;
            self.end_stream(driver, 0, stream);
        }
        Ok(())
    }

    /// The context to make current for working in it; `None` for a client's green context.
    pub fn context(&self) -> Option<CUcontext> {
        self.lasting.as_ref().map(|lasting| lasting.context)
    }

    /// Returns a non-blocking stream: a kept one if available, else a new one. The device's context must be current.
    ///
    /// # Errors
    /// Driver errors.
    pub fn take_stream(&self, driver: &Driver, priority: i32) -> Result<CUstream, CUresult> {
        match self.take_kept(priority) {
            Some(stream) => Ok(stream),
            None => self.create_stream(driver, priority),
        }
    }

    /// Returns a kept stream of this priority, if available.
    pub fn take_kept(&self, priority: i32) -> Option<CUstream> {
        self.lasting.as_ref()?.streams.take(priority)
    }

    /// Whether a kept stream of this priority is available.
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

    /// Whether it is one of the server's own, whose streams are kept.
    pub fn is_lasting(&self) -> bool {
        self.lasting.is_some()
    }

    /// Keeps a drained stream of the server's own green context, or destroys a stream of a client's.
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

    /// Number of kept streams.
    pub fn kept_streams(&self) -> usize {
        self.lasting
            .as_ref()
            .map_or(0, |lasting| lasting.streams.count())
    }
}

/// Referenced by sessions and by streams.
pub type GreenRef = Arc<Green>;

/// Multiprocessor resources known to a session.
#[derive(Debug, Default)]
pub struct Resources {
    list: Vec<(CUdevResource, Ordinal)>,
    descriptions: Vec<(Vec<u32>, CUdevResourceDesc, Ordinal)>,
    /// Handles of green contexts that entries of the list come from.
    sources: HashSet<u64>,
    /// Number of destroyed green contexts that the next server makes again, too.
    ended: usize,
}

/// Token and number of multiprocessors of a resource, as a client was told of it.
pub type Told = (u32, u32);

/// Number of multiprocessors of a resource; other kinds of resources have none.
pub fn count_of(resource: &CUdevResource) -> u32 {
    match resource.kind {
        CU_DEV_RESOURCE_TYPE_SM => resource.sm[0],
        _ => 0,
    }
}

impl Resources {
    /// Number of resources and descriptions.
    pub fn len(&self) -> usize {
        self.list.len() + self.descriptions.len()
    }

    /// Registers resources of a device, all or none, and returns their descriptions for the client.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` beyond [`bounds::RESOURCES`].
    pub fn tell(
        &mut self,
        resources: &[CUdevResource],
        device: Ordinal,
    ) -> Result<Vec<Resource>, CUresult> {
        let before = self.list.len();
        let told = resources.iter().map(|one| self.tell_one(*one, device));
        let told: Result<Vec<Resource>, CUresult> = told.collect();
        if told.is_err() {
            self.list.truncate(before);
        }
        told
    }

    /// Registers resources of a device as those of which the client was told with these tokens.
    ///
    /// # Errors
    /// How they differ.
    pub fn tell_again(
        &mut self,
        resources: &[CUdevResource],
        device: Ordinal,
        told: &[Told],
    ) -> Result<(), String> {
        if resources.len() != told.len() {
            let (now, before) = (resources.len(), told.len());
            return Err(format!(
                "{now} groups of multiprocessors instead of {before}"
            ));
        }
        for (resource, (token, count)) in resources.iter().zip(told) {
            let now = count_of(resource);
            if now != *count {
                return Err(format!("{now} multiprocessors instead of {count}"));
            }
            let next = self.list.len();
            match *token as usize {
                known if known < next => {}
                new if new == next && new < bounds::RESOURCES => {
                    self.list.push((*resource, device));
                }
                token => return Err(format!("resource {token} instead of {next}")),
            }
        }
        Ok(())
    }

    /// Notes that entries of the list come from this green context.
    pub fn note_source(&mut self, green: u64) {
        self.sources.insert(green);
    }

    /// Notes that a green context has ended. If entries of the list or streams come from it, the next server needs it, and
    /// the result is `true`.
    pub fn note_ended(&mut self, green: u64, has_streams: bool) -> bool {
        let is_needed = self.sources.remove(&green) || has_streams;
        self.ended += usize::from(is_needed);
        is_needed
    }

    /// Whether the next server would have to make too many green contexts that were destroyed.
    pub fn has_many_ended(&self) -> bool {
        self.ended > MOST_ENDED
    }

    fn tell_one(&mut self, resource: CUdevResource, device: Ordinal) -> Result<Resource, CUresult> {
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

    /// The driver's structure of a resource, and its device.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_RESOURCE_TYPE` for a token that was never issued.
    pub fn get(&self, token: u32) -> Result<(CUdevResource, Ordinal), CUresult> {
        self.list
            .get(token as usize)
            .copied()
            .ok_or(CUDA_ERROR_INVALID_RESOURCE_TYPE)
    }

    /// Combines resources into a description (`cuDevResourceGenerateDesc`). Returns its index; the same combination has
    /// the same index.
    ///
    /// # Errors
    /// Driver errors; `CUDA_ERROR_OUT_OF_MEMORY` beyond [`bounds::RESOURCES`] combinations.
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
    /// `CUDA_ERROR_INVALID_VALUE` for an index that was never issued, or of another device.
    pub fn description(&self, at: usize, device: Ordinal) -> Result<CUdevResourceDesc, CUresult> {
        match self.descriptions.get(at) {
            Some((_, description, of)) if *of == device => Ok(*description),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
}

/// Generates the description from which a green context of these resources is created (`cuDevResourceGenerateDesc`).
///
/// # Errors
/// Driver errors.
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
