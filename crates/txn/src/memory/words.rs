//! Single words of far memory.

use farpool_fabric::ArenaBuf;

use super::{Memory, MemoryError, Piece};

const WORD_BYTES: usize = size_of::<u64>();

impl Memory {
    /// Reads a word.
    pub(crate) async fn read_word(&self, piece: &Piece, at: u64) -> Result<u64, MemoryError> {
        let bytes = self.read(piece, at..at + WORD_BYTES as u64).await?;
        let bytes = bytes.first_chunk().expect("as many bytes as were asked for");
        Ok(u64::from_le_bytes(*bytes))
    }

    /// Writes a word.
    pub(crate) async fn write_word(&self, piece: &Piece, at: u64, word: u64) -> Result<(), MemoryError> {
        let buffer = self.take_soon(WORD_BYTES).await?;
        self.write_word_from(buffer, piece, at, word).await.map(drop)
    }

    /// A buffer for a word, taken in advance by an operation that must not fail later for lack of one.
    pub(crate) fn word_buffer(&self) -> Result<ArenaBuf, MemoryError> {
        Ok(self.take(WORD_BYTES)?)
    }

    /// Writes a word from a [`word_buffer`](Self::word_buffer), which is returned.
    pub(crate) fn write_word_from(
        &self,
        mut buffer: ArenaBuf,
        piece: &Piece,
        at: u64,
        word: u64,
    ) -> impl Future<Output = Result<ArenaBuf, MemoryError>> {
        buffer.copy_from_slice(&word.to_le_bytes());
        self.write_from(buffer, piece, at)
    }
}
