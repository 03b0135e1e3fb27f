"""LangChain chat model, retriever and RAG chain for a blendserve server."""

from langchain_blendserve.chains import create_blend_chain, create_blend_documents_chain
from langchain_blendserve.chat_models import ChatBlendserve
from langchain_blendserve.retrievers import BlendserveRetriever

__all__ = ["BlendserveRetriever", "ChatBlendserve", "create_blend_chain", "create_blend_documents_chain"]
