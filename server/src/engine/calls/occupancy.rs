//! Occupancy.

use super::super::Shared;
use super::super::session::Session;
use super::Reply;
use mpsshim_proto::cuda::CUstream;
use mpsshim_proto::message::{Launch, Occupancy};
use mpsshim_proto::ring::Message;

impl Session {
    /// `cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags`, `cuOccupancyAvailableDynamicSMemPerBlock`.
    pub fn occupancy(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: Occupancy = self.body(message)?;
        let function = self.function_ready(shared, body.function)?;
        if body.kind == 0 {
            let mut blocks = 0;
            shared.driver.occupancy_max_active_blocks(
                &mut blocks,
                function,
                body.block,
                body.shared as usize,
                body.flags,
            )?;
            Ok(super::value(blocks as u64))
        } else {
            let mut bytes = 0;
            shared.driver.occupancy_available_shared(
                &mut bytes,
                function,
                body.shared as i32,
                body.block,
            )?;
            Ok(super::value(bytes as u64))
        }
    }

    /// `cuOccupancyMaxActiveClusters`, `cuOccupancyMaxPotentialClusterSize`.
    pub fn clusters(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: Launch = self.body(message)?;
        let function = self.function_ready(shared, body.function)?;
        let attributes = self.attributes(message, &body)?;
        let config = attributes.config(&body, CUstream::NULL);
        let mut clusters = 0;
        if body.flags == 0 {
            shared
                .driver
                .occupancy_max_active_clusters(&mut clusters, function, &config)?;
        } else {
            shared
                .driver
                .occupancy_max_cluster_size(&mut clusters, function, &config)?;
        }
        Ok(super::value(clusters as u64))
    }
}
