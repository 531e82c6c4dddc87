"""How long a response will be, from what is known: the ranker behind dispatch by length."""


class LengthHistory:
    """Mean length of earlier responses to the same prompt; for a new prompt, in proportion to its own length.

    Lengths only rank requests, so a rough estimate does. Ours is the simplest that needs no model; StreamRL
    (arXiv 2504.15930) trains one.
    """

    def __init__(self, first_guess: float) -> None:
        """first_guess: tokens, until a response has ended."""
        self._first_guess = first_guess
        self._of_prompt: dict[str, tuple[int, int]] = {}
        self._responses = self._response_tokens = self._prompt_tokens = 0

    def observe(self, uid: str, prompt_tokens: int, response_tokens: int) -> None:
        """Notes the length of a response that ended."""
        count, total = self._of_prompt.get(uid, (0, 0))
        self._of_prompt[uid] = (count + 1, total + response_tokens)
        self._responses += 1
        self._response_tokens += response_tokens
        self._prompt_tokens += prompt_tokens

    def expect(self, uid: str, prompt_tokens: int) -> float:
        """Returns the response tokens to expect."""
        if uid in self._of_prompt:
            count, total = self._of_prompt[uid]
            return total / count
        if not self._responses:
            return self._first_guess
        return self._response_tokens / self._responses * (prompt_tokens * self._responses / self._prompt_tokens)
